"""What the runner does for the strategy "kvstore": run files, servers that it starts, and the
proof."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import allhands
from allhands import KVStore, UserError
from allhands.cli.run_training import train
from allhands.config import read_run
from allhands.loop import loop_checkpoints
from tests.patience import patience
from tests.runner.problems import arguments, classification, classifier, fit

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


class NanOnRankOne(nn.Module):
    """A loss that is NaN on rank 1."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        world = allhands.current_world()
        assert world is not None
        return nn.functional.cross_entropy(output, target) * (
            float("nan") if world.rank == 1 else 1.0
        )


RUN = (
    "data: {name: digits, batch_size: 64}\nmodel: {name: mlp}\nworkers: 2\ndevice: cpu\ncheck: "
    "true\nlogdir: null\n"
)


def test_a_run_file_names_it_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text(
        RUN + "strategy: {name: kvstore, mode: ssp, staleness: 3, servers: 2, damping: true}\n"
    )
    history = train(read_run([path]))
    assert len(history["train"]["staleness"]) == 3
    for override, said in (
        ("strategy.server=1", "kvstore has no such option; did you mean 'servers'"),
        ("strategy.servers=0", "needs parameter servers"),
        ("strategy.mode=sync", "only mode='ssp' bounds staleness"),
        ("strategy.compress={type: 3bit}", "there is no codec '3bit'"),
        ("strategy.snapshot_every=5", "snapshot_every=… and snapshot_dir=… belong together"),
    ):
        with pytest.raises(UserError, match=said):
            train(read_run([path], [override]))


def test_verify_holds_it_to_one_process() -> None:
    given = arguments(model=classifier())
    loaders = {"train": given["loaders"]["train"]}
    report = allhands.verify(
        model=given["model"],
        criterion=given["criterion"],
        optimizer=given["optimizer"],
        loaders=loaders,
        steps=8,
        clip_norm=0.5,
        strategies=KVStore(servers=1),
        workers=(2,),
    )
    assert [row.verdict for row in report.rows] == ["same"]


def test_verify_measures_how_far_compression_drifts() -> None:
    given = arguments(model=classifier())
    report = allhands.verify(
        model=given["model"],
        criterion=given["criterion"],
        optimizer=given["optimizer"],
        loaders={"train": given["loaders"]["train"]},
        steps=8,
        strategies=KVStore(compress={"name": "topk", "keep": 0.3}),
        workers=(2,),
    )
    assert [row.verdict for row in report.rows] == ["lossy as declared"]
    assert 1e-4 < report.rows[0].difference < 1.0


def checkpoint_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [{"strategy/w": torch.tensor([1.0, 2.0])}, {"strategy/w": torch.tensor([10.0, 20.0])}]
    monkeypatch.setattr(loop_checkpoints.checkpoint, "load_own", lambda path, rank: kept[rank])


@pytest.mark.parametrize(
    ("rank", "workers", "expected"),
    [
        (0, 2, [1.0, 2.0]),
        (1, 2, [10.0, 20.0]),
        (0, 3, [11.0, 22.0]),
        (1, 3, None),
        (0, 1, [11.0, 22.0]),
    ],
)
def test_what_compression_left_over_is_lost_on_no_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, rank: int, workers: int, expected: list[float] | None
) -> None:
    checkpoint_of_two(monkeypatch)
    given: list[dict[str, torch.Tensor]] = []
    lines: list[str] = []

    def load(tensors: dict[str, torch.Tensor]) -> bool:
        given.append(tensors)
        return workers != 1

    loop = SimpleNamespace(
        world=SimpleNamespace(rank=rank, world_size=workers),
        reporter=SimpleNamespace(line=lines.append),
    )
    group = SimpleNamespace(
        strategy=SimpleNamespace(name="ddp"), exchange=SimpleNamespace(load_own_tensors=load)
    )
    loading = object.__new__(loop_checkpoints.LoopCheckpoints)
    loading.loop = loop  # type: ignore[assignment]
    state = {"world_size": 2, "strategy": {"ddp": {}}}
    loading._load_strategys_own(
        Path("x"),
        state,
        loop_checkpoints.checkpoint.load_own(Path("x"), 0),
        "strategy/",
        group,  # type: ignore[arg-type]
    )
    assert [{name: value.tolist() for name, value in one.items()} for one in given] == [
        {"w": expected} if expected else {}
    ]
    assert [
        line.startswith("note: the checkpoint holds what compression had left over")
        for line in lines
    ] == [True] * (workers == 1)


def test_a_worker_has_the_whole_state_between_steps_alone(tmp_path: Path) -> None:
    held: list[int] = []

    class Look(allhands.Callback):
        def on_step_end(self, training: Any) -> None:
            held.append(len(optimizer.state))

    for epochs in (2, 3):  # the first ends with a checkpoint, from which the second goes on
        model = classifier()
        optimizer = torch.optim.Adam(model.parameters())
        fit(
            model=model,
            optimizer=optimizer,
            num_epochs=epochs,
            logdir=tmp_path,
            resume=tmp_path if epochs > 2 else None,
            distributed=KVStore(update="store"),
            callbacks=[Look()],
        )
        assert len(optimizer.state) == len(list(model.parameters()))
        assert int(optimizer.state[model[0].weight]["step"]) == len(held)
    assert set(held) == {0}


def test_a_worker_that_fails_alone_ends_all() -> None:
    """Nobody waits for it in a collective: with "async" the error of the one worker ends the
    training."""
    with pytest.raises(allhands.AllhandsError, match=r"rank 1"):
        fit(distributed=KVStore("async", servers=1), workers=2, criterion=NanOnRankOne())


# Two epochs of 14 steps in a job of the launcher; argv says what happens in one of them.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from allhands import Callback, SupervisedRunner
from tests.runner.problems import arguments, classification
from torch.utils.data import DataLoader


class Within(Callback):
    def on_step_end(self, training):
        if sys.argv[1] == "wait":
            time.sleep(0.2)
            if training.step == 3:
                Path(f"begun-{training.world.rank}").write_text("")
        if training.step == 20 and sys.argv[1] == "kill" and training.world.rank == 0:
            os.kill(training.loop.exchange.stored.store.links[0].where["pid"], signal.SIGKILL)


given = arguments(num_epochs=2, loaders={"train": DataLoader(classification(), 2, shuffle=True)})
SupervisedRunner(device="cpu").train(
    **given, distributed="kvstore", logdir="run", resume="auto", callbacks=[Within()])
if os.environ["RANK"] == "1":
    state = given["model"].state_dict()
    Path("weights").write_text(json.dumps({name: value.tolist() for name, value in state.items()}))
"""


def job_of_launcher(folder: Path, action: str) -> tuple[int, str]:
    """Run SCRIPT with two workers and a server; with "wait" the launcher gets SIGTERM after step 3.
    Code and output."""
    (folder / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from allhands.cli.main import main; main()",
            "launch",
            "-n",
            "2",
            "-s",
            "1",
            "script.py",
            action,
        ],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        end = time.monotonic() + 60
        while action == "wait" and len(list(folder.glob("begun-*"))) < 2:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        if action == "wait":
            process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=patience(40))
    finally:
        process.kill()
    return process.returncode, told


# rare: kvstore/test_mirror.py kills a server of a launched training, faults/test_resume.py stops
# trainings.
@pytest.mark.rare
def test_a_job_with_a_server_is_stopped_loses_its_server_and_ends_as_if_it_had_not(
    tmp_path: Path,
) -> None:
    code, told = job_of_launcher(tmp_path, "wait")
    assert code == 128 + signal.SIGTERM, told
    assert "stopped by SIGTERM after optimizer step" in told, told
    (stopped,) = (tmp_path / "run" / "checkpoints").glob("epoch-0001-step-*")

    code, told = job_of_launcher(tmp_path, "kill")
    assert code == 128 + signal.SIGKILL, told
    assert f"resuming from {stopped}" in told, told
    assert re.search(r"allhands: server 0 \(.*\) failed first: killed by SIGKILL", told), told

    code, told = job_of_launcher(tmp_path, "finish")
    assert code == 0, told
    assert f"resuming from {tmp_path}/run/checkpoints/epoch-0001" in told, told
    loaders = {"train": DataLoader(classification(), 2, shuffle=True)}
    whole, _ = fit(distributed=KVStore(servers=1), workers=2, num_epochs=2, loaders=loaders)
    found = json.loads((tmp_path / "weights").read_text())
    assert found == {name: value.tolist() for name, value in whole.state_dict().items()}
