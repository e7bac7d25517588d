"""Trainings by `local_sgd` that go on when a worker is lost: the same weights and metrics as with
all the workers with which they began."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Job
from .elastic_jobs import SCRIPT, Runner, assert_same, result

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

NET = "torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))"
NORM = NET.replace("torch.nn.Tanh()", "torch.nn.Tanh(), torch.nn.BatchNorm1d(16)")


def script_of(strategy: str, text: str = SCRIPT) -> str:
    """The training by a strategy, with running statistics; epochs of 7 steps."""
    changed = text.replace('logdir="logs"', f'logdir="logs", strategy=allhands.{strategy}')
    if text is not SCRIPT:
        changed = text.replace("num_epochs=3", f"num_epochs=3, distributed=allhands.{strategy}")
    return (
        changed.replace(NET, NORM)
        .replace("in model.parameters()]", "in model.state_dict().values()]")
        .replace("p.detach().flatten()", "p.detach().double().flatten()")
    )


def undisturbed(job: Job, script: str, workers: int) -> list[Any]:
    path = job.script(script, "undisturbed.py")
    code, out, err = job.run("-n", str(workers), path, "4", "0")
    assert code == 0, out + err
    found = result(job.folder)
    (job.folder / "final.json").unlink()
    return found


def assert_as_with_all(found: list[Any], others: list[Any]) -> None:
    for one in (found, others):
        one[1]["train"].pop("bytes_per_step", None)  # which is not that of other workers
    assert_same(found, others)


@pytest.mark.parametrize("strategy", ["LocalSGD(every=4)"])
@pytest.mark.parametrize(
    "losses",
    [
        ["2@5:SIGKILL"],
        ["0@0:SIGKILL", "1@e2:SIGKILL"],
        # rare: the rows around it lose rank 0, lose two ranks, and lose one in an epoch's midst
        pytest.param(["0@10:SIGKILL", "1@13:SIGKILL"], marks=pytest.mark.rare),
        ["1@6:SIGTERM"],
        # rank 0 has not taken the step, after which weights are exchanged, that rank 1 has
        ["2@7:dies", "0@7:behind"],
        ["2@5:dies", "1@5:behind"],
    ],
    ids=" ".join,
)
def test_the_others_train_a_lost_workers_replica(
    job: Job, strategy: str, losses: list[str]
) -> None:
    text = script_of(strategy)
    others = undisturbed(job, text, 3)
    code, out, err = job.run("-n", "3", "--elastic", job.script(text), "4", "0", *losses)
    assert code == 0, out + err
    assert "3 workers of local_sgd are trained whoever is there" in out
    found = result(job.folder)
    assert found[3] == 3 - sum("SIG" in word or "dies" in word for word in losses)
    assert_as_with_all(found, others)


RUNNER = script_of("LocalSGD(every=3, outer='nesterov')", Runner.SCRIPT)


@pytest.mark.parametrize("losses", [["1@4:SIGKILL", "0@e2:SIGKILL"], ["2@8:SIGKILL"]], ids=str)
def test_a_runners_training_goes_on_with_an_outer_momentum(job: Job, losses: list[str]) -> None:
    others = undisturbed(job, RUNNER, 3)
    code, out, err = job.run("-n", "3", "--elastic", job.script(RUNNER), "4", "0", *losses)
    assert code == 0, out + err
    found = result(job.folder)
    assert found[3] == 3 - len(losses)
    assert_as_with_all(found, others)


def test_evaluations_between_steps_see_the_mean_of_all_replicas(job: Job) -> None:
    often = RUNNER.replace("    loaders={", "    evaluate_every=4, loaders={").replace(
        'self.maybe(f"e{training.epoch + 1}")', 'self.maybe(f"v{training.step}")'
    )
    others = undisturbed(job, often, 3)
    words = ("-n", "3", "--elastic", job.script(often), "4", "0", "1@v8:SIGKILL", "0@10:SIGKILL")
    code, out, err = job.run(*words)
    assert code == 0, out + err
    found = result(job.folder)
    assert found[3] == 1
    assert found[1]["step"] == [4, 8, 12, 16, 20, 21]
    assert_as_with_all(found, others)


def test_a_worker_that_joins_takes_a_replica_over(job: Job) -> None:
    text = script_of("LocalSGD(every=4)")
    others = undisturbed(job, text, 3)
    words = ("-n", "3", "--spares", "1", "--elastic", job.script(text), "4", "0.4", "0@9:SIGKILL")
    code, out, err = job.run(*words, timeout=150)
    assert code == 0, out + err
    assert "membership 2: 1 worker joined; 3 workers go on" in out
    found = result(job.folder)
    assert found[3] == 3
    assert_as_with_all(found, others)


def test_a_replica_that_was_lost_with_its_copy_ends_the_training(job: Job) -> None:
    script = job.script(script_of("LocalSGD(every=4)"))
    words = ("-n", "4", "--elastic", script, "3", "0", "1@6:SIGKILL", "2@6:SIGKILL")
    code, out, err = job.run(*words)
    assert code != 0
    assert "worker 1 of local_sgd was lost, and with it the one that has a copy" in out + err
    assert "--max-restarts" in out + err


@pytest.mark.parametrize("setting", ["compress='int8'", "fragments=2", "mix=0.5"])
def test_what_workers_would_keep_after_an_exchange_is_refused(job: Job, setting: str) -> None:
    script = job.script(script_of(f"LocalSGD(every=4, {setting})"))
    code, out, err = job.run("-n", "2", "--elastic", script, "4", "0", "1@5:SIGKILL")
    assert code != 0
    assert f"in spite of --elastic: LocalSGD({setting})" in out
    assert f"cannot go on without starting again: LocalSGD({setting})" in out + err


def test_a_checkpoint_of_fewer_workers_than_replicas_is_gone_on_from(job: Job) -> None:
    text = script_of("LocalSGD(every=4)").replace('logdir="logs"', 'logdir="logs", resume="auto"')
    words = ("-n", "3", "--elastic", "--min-workers", "2", job.script(text), "4", "0.1")
    code, out, err = job.run(*words, "1@3:SIGKILL", "2@9:SIGKILL")
    assert code == 137, out + err
    assert "in epoch 2: saved in" in out
    code, out, err = job.run(*words)
    assert code == 0, out + err
    assert "the checkpoint was written by 1 worker, and 3 go on" in out
    found = result(job.folder)
    assert found[2] == 21
