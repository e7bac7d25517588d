"""Federated rounds on several numbers of workers: the same, and a planted difference that is
found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import allhands
from allhands.errors import UserError
from allhands.federated import Federated
from allhands.loop import workers
from allhands.verify.compare import verify
from allhands.verify.federated_rounds import verify_rounds
from tests.federated import simulating as sim

STRATEGY = Federated(clients=6, per_round=4, rounds=3, executor="serial")


class OfTheRank(nn.MSELoss):
    """A loss that is another one on another rank: the fault that is planted."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output, target) * (1 + int(os.environ.get("RANK", "0")))


def objects(criterion: nn.Module | None = None) -> dict[str, Any]:
    net = sim.model()
    return {
        "model": net,
        "criterion": criterion or nn.MSELoss(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "datasets": {"batch_size": 4, "train": TensorDataset(*sim.data())},
    }


def test_the_same_training_is_called_so(monkeypatch, capsys):
    monkeypatch.setattr(workers, "world_around", lambda: 1)
    report = verify_rounds(objects, STRATEGY, [1], 2, "cpu")
    allhands.finalize()
    said = capsys.readouterr().out
    assert report.ok
    assert "2 federated rounds on 1 worker" in said
    assert "      1  same       same       same       0.0e+00" in said
    with pytest.raises(UserError, match="without a plot"):
        report.save_plot(Path("plot.png"))
    assert STRATEGY.rounds == 3


@pytest.mark.serial
def test_a_difference_is_found(capsys):
    report = verify_rounds(lambda: objects(OfTheRank()), STRATEGY, [2], 2, "cpu")
    said = capsys.readouterr().out
    assert not report.ok
    assert "      2  same       DIFFERENT  DIFFERENT" in said
    assert "not the same training" in said


def test_steps_are_not_compared():
    given = objects()
    with pytest.raises(UserError, match="verify_rounds"):
        verify(strategies=STRATEGY, workers=1, **given)
