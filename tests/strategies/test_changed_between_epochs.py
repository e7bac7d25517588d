"""Callbacks that change the groups of a sharded model's optimizer in ways that shards cannot follow
are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Callback, SupervisedRunner, UserError
from tests.worlds import in_world

pytestmark = pytest.mark.serial


class Regroup(Callback):
    """Moves a weight of the last layer into a group of its own before the second epoch."""

    def on_epoch_start(self, training: Any) -> None:
        if training.epoch == 1:
            group = training.optimizer.param_groups[0]
            training.optimizer.param_groups.append({**group, "params": [group["params"].pop()]})


class Foreign(Callback):
    """Gives the optimizer a parameter that is not the model's before the second epoch."""

    def on_epoch_start(self, training: Any) -> None:
        if training.epoch == 1:
            training.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def refusal(change: type[Callback]) -> str:
    model, data = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        TensorDataset(torch.rand(8, 4), torch.rand(8, 2)),
    )
    with pytest.raises(UserError) as caught:
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.SGD(model[2].parameters(), lr=0.1),
            num_epochs=2,
            loaders={"train": DataLoader(data, 4), "valid": DataLoader(data, 4)},
            callbacks=[change()],
            distributed="fsdp",
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [(Regroup, "optimizer.add_param_group"), (Foreign, "add those of `training.model`")],
)
def test_groups_that_shards_cannot_follow_are_named(change: type[Callback], said: str) -> None:
    for text in in_world(2, refusal, change):
        assert said in text
