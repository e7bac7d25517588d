"""Ctrl-C keeps what has been trained, by workers and in one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Callback, SupervisedRunner, World, load_checkpoint
from allhands.loop import agreement

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]

ALONE = World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "alone")


class Interrupts(Callback):
    """Stands for the user, who presses Ctrl-C in the process that has started the workers."""

    def __init__(self, at: int) -> None:
        self.at, self.user = at, os.getpid()
        self.weights: list[torch.Tensor] = []

    def on_step_end(self, training: Any) -> None:
        self.weights.append(training.model.weight.detach().clone())
        time.sleep(0.05)
        if training.step == self.at and training.world.rank == 0:
            os.kill(self.user, signal.SIGINT)


@pytest.mark.parametrize("logs", [False, True])
def test_the_weights_of_the_last_step_come_back(
    logs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 2))
    callback = Interrupts(at=25)
    with pytest.raises(KeyboardInterrupt):
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=optimizer,
            loaders={"train": DataLoader(data, batch_size=2)},
            num_epochs=200,
            callbacks=[callback],
            distributed=True,
            workers=2,
            logdir=tmp_path / "run" if logs else None,
        )
    assert 25 <= len(callback.weights) < 1000
    assert torch.equal(model.weight, callback.weights[-1])
    assert set(optimizer.state) == {model.weight, model.bias}
    assert model.training
    out = capsys.readouterr().out
    assert f"interrupted after optimizer step {len(callback.weights)}, in epoch" in out
    if logs:
        names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
        assert not [name for name in names if name.endswith(".tmp") or name.startswith(".")]
        state = load_checkpoint(tmp_path / "run")
        assert state["step"] == len(callback.weights)
        assert torch.equal(state["model"]["weight"], model.weight)


HERE = """
import os, signal, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from allhands import Callback, SupervisedRunner

class Interrupts(Callback):
    def on_step_end(self, training):
        self.weights = training.model.weight.detach().clone()
        self.buffers = [s["momentum_buffer"].clone() for s in training.optimizer.state.values()]
        if training.step == 25:
            os.killpg(0, signal.SIGINT)

data = TensorDataset(torch.randn(40, 3), torch.randn(40, 2))
model, seen, runner = torch.nn.Linear(3, 2), Interrupts(), SupervisedRunner(device="cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
handler = signal.getsignal(signal.SIGINT)
given = dict(
    model=model, criterion=torch.nn.MSELoss(), optimizer=optimizer, callbacks=[seen],
    loaders={"train": DataLoader(data, batch_size=2, num_workers=int(sys.argv[1]))},
    logdir="run",
)
try:
    runner.train(num_epochs=10_000, **given)
except KeyboardInterrupt as error:
    assert type(error) is KeyboardInterrupt
    assert torch.equal(model.weight, seen.weights)
    now = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(map(torch.equal, now, seen.buffers))
    assert signal.getsignal(signal.SIGINT) is handler
    assert runner.model is model
    print("rows", len(runner.last_history["epoch"]))
history = runner.train(num_epochs=3, resume="auto", **given)
print("steps", history["step"])
"""


@pytest.mark.parametrize("loader_processes", [0, 2])
def test_in_one_process_it_ends_after_the_step(loader_processes: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HERE, str(loader_processes)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        start_new_session=True,  # the signal goes to the whole group, as that of a terminal does
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("interrupted after optimizer step 25, in epoch 2") for line in lines)
    assert "rows 1" in lines
    assert lines[-1] == "steps [20, 40, 60]"


def test_a_second_one_ends_it_at_once() -> None:
    asked = agreement.Agreement(ALONE, None, ())
    asked.take_interrupts()
    with asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        asked.ask(1)


def test_one_after_the_last_step_is_not_lost() -> None:
    asked = agreement.Agreement(ALONE, None, ())
    asked.take_interrupts()
    with pytest.raises(KeyboardInterrupt), asked:
        signal.raise_signal(signal.SIGINT)
