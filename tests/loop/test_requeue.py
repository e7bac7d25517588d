"""A training in a Slurm job that a signal ends and that Slurm starts again. The real Slurm is in
tests/cluster."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from allhands import Callback, UserError, slurm
from tests.loop.test_agreement import Send
from tests.runner.problems import fit


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_PROCID", "ALLHANDS_REQUEUE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    return monkeypatch


def test_a_requeued_job_goes_on_where_it_was_stopped(
    job: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[list[str]] = []

    def requeue() -> str:
        found.append(sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()))
        return "requeued job 9"

    job.setattr(slurm, "requeue", requeue)
    job.setenv("ALLHANDS_REQUEUE", "1")
    whole, _ = fit(dropout=0.3)
    with pytest.raises(SystemExit) as ended:
        fit(dropout=0.3, logdir=tmp_path / "run", callbacks=[Send("step", signal.SIGUSR1)])
    assert ended.value.code == 128 + signal.SIGUSR1
    # By then the checkpoint was whole.
    assert found == [["epoch-0001-step-000000004", "job", "last"]]
    assert "requeued job 9" in capsys.readouterr().out

    job.setenv("SLURM_RESTART_COUNT", "1")
    resumed, history = fit(dropout=0.3, logdir=tmp_path / "run", callbacks=[Callback()])
    assert (
        "job 9 was requeued (restart 1): going on with its own newest checkpoint"
        in capsys.readouterr().out
    )
    assert history["step"] == [7, 14, 21]
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
    )
    assert not (tmp_path / "run" / "earlier-1").exists()


def test_the_checkpoints_of_another_job_are_set_aside(
    job: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(logdir=tmp_path, num_epochs=1)
    job.setenv("SLURM_JOB_ID", "10")
    job.setenv("SLURM_RESTART_COUNT", "2")
    _, history = fit(logdir=tmp_path, num_epochs=1)
    assert history["epoch"] == [1]
    assert (
        f"the logdir held an earlier run, now in {tmp_path / 'earlier-1'}"
        in capsys.readouterr().out
    )
    assert (tmp_path / "checkpoints" / "job").read_text() == "slurm 10\n"


def test_nothing_is_requeued_unasked_and_a_useless_wish_is_told(
    job: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    job.setattr(slurm, "requeue", lambda: asked.append(None))
    with pytest.raises(SystemExit):
        fit(logdir=tmp_path, callbacks=[Send("step", signal.SIGTERM)])
    assert asked == []
    job.setenv("ALLHANDS_REQUEUE", "1")
    fit(num_epochs=1)
    assert (
        "note: ALLHANDS_REQUEUE=1 has no effect here: without a logdir nothing is saved"
        in capsys.readouterr().out
    )
    job.setenv("ALLHANDS_REQUEUE", "please")
    with pytest.raises(UserError, match="ALLHANDS_REQUEUE='please'"):
        fit(num_epochs=1)


def test_workers_that_are_started_again_go_on(
    job: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.delenv("SLURM_JOB_ID")
    job.setenv("TORCHELASTIC_RUN_ID", "a1")
    first = tmp_path / "first"
    fit(logdir=first, num_epochs=1, callbacks=[Callback()])
    with pytest.raises(SystemExit):
        fit(
            logdir=tmp_path / "run",
            resume=first / "checkpoints" / "last",
            callbacks=[Send("epoch", signal.SIGUSR1)],
        )
    job.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    capsys.readouterr()
    # What the command line says was for the first start; this run has come further since.
    _, history = fit(
        logdir=tmp_path / "run", resume=first / "checkpoints" / "last", callbacks=[Callback()]
    )
    told = capsys.readouterr().out
    assert (
        "the workers were started again (attempt 2): going on with its own newest checkpoint"
        in told
    )
    assert f"resuming from {tmp_path / 'run'}" in told
    assert history["step"] == [7, 14, 21]
    # Another job's restart is another matter.
    job.setenv("TORCHELASTIC_RUN_ID", "b2")
    fit(logdir=tmp_path / "run", num_epochs=1)
    assert "the logdir held an earlier run" in capsys.readouterr().out
