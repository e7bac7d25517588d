"""Ctrl-C during a training by workers keeps what has been trained, as it does in one process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Callback, SupervisedRunner, load_checkpoint

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


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
