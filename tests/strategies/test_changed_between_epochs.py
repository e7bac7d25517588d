"""Callbacks that change the optimizer of a sharded model: refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Callback, SupervisedRunner, UserError
from tests.worlds import in_world

pytestmark = pytest.mark.serial


class Change(Callback):
    """Gives the first layer to the optimizer before the second epoch."""

    def on_epoch_start(self, training: Any) -> None:
        if training.epoch == 1:
            training.optimizer.add_param_group({"params": list(training.model[0].parameters())})


def refusal() -> str:
    model, data = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), TensorDataset(torch.rand(8, 4), torch.rand(8, 2))
    with pytest.raises(UserError) as caught:
        SupervisedRunner(device="cpu").train(
            model=model, criterion=nn.MSELoss(), optimizer=torch.optim.SGD(model[2].parameters(), lr=0.1), num_epochs=2,
            loaders={"train": DataLoader(data, 4), "valid": DataLoader(data, 4)}, callbacks=[Change()], distributed="fsdp",
        )  # fmt: skip
    return str(caught.value)


def test_groups_that_shards_cannot_follow_are_named() -> None:
    for text in in_world(2, refusal):
        assert "add_param_group" in text
        assert "distributed='ddp'" in text
