"""A ``for`` over a loop that is left before its end."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import allhands
from tests.loop.own_loops import assert_same, batches_by_hand, loaders, net, weights
from tests.worlds import in_world


def left_early(strategy: str, how: str) -> list[torch.Tensor]:
    model = net()
    start = weights(model)
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders=loaders(2),
        strategy=strategy,
    )

    def train() -> None:
        for step in loop.steps(9):
            loop.step(lambda batch: F.cross_entropy(loop.model(batch[0]), batch[1]), step.batch)
            if step.number == 2 and how == "return":
                return
            if step.number == 2 and how == "break":
                break
            if how == "error":
                raise ValueError("an error of the user's")

    if how == "error":
        with pytest.raises(ValueError, match="an error of the user's"):
            train()
        return start
    train()
    return weights(model)


@pytest.mark.serial
@pytest.mark.parametrize("how", ["break", "return", "error"])
def test_a_break_ends_the_training_with_its_weights_in_place(how: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in itertools.islice(batches_by_hand(1), 0 if how == "error" else 2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for found in in_world(2, left_early, "fsdp", how):
        assert_same(found, weights(model))
