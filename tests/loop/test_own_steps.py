"""What the models of an own loop are while others look at them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allhands
from tests.loop.own_loops import GLOBAL, SAMPLES, loaders, net
from tests.worlds import in_world


def modes_in_evaluation() -> list[bool]:
    model = nn.Sequential(net(), nn.Dropout(0.5))
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders=loaders(2),
        strategy="fsdp",
    )
    modes = []
    for epoch in loop.epochs(1):
        for batch in epoch.train:
            loop.step(lambda batch: F.cross_entropy(loop.model(batch[0]), batch[1]), batch)
            modes.append(loop.model.training)
        with epoch.evaluating("valid"):
            modes += [module.training for module in loop.model.modules()]
    return modes


@pytest.mark.serial
def test_evaluation_is_without_dropout_where_ranks_hold_parts() -> None:
    steps = -(-SAMPLES // GLOBAL)
    for modes in in_world(2, modes_in_evaluation):
        assert modes[:steps] == [True] * steps
        assert modes[steps:]
        assert not any(modes[steps:])


def train_two_models_with_one_optimizer() -> None:
    one, other = net(6, 8), net(8, 3)
    with pytest.raises(allhands.UserError, match="one optimizer trains 2 models, and fsdp"):
        allhands.Loop(
            models={"one": one, "other": other},
            optimizers={"both": torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1)},
            strategy="fsdp",
        )


@pytest.mark.serial
def test_one_optimizer_of_two_models_is_refused_by_fsdp() -> None:
    in_world(2, train_two_models_with_one_optimizer)
