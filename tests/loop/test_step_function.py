"""What is known of a step function after its first batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Loop, UserError


def train(factor: Callable[[], Any], power: float) -> int:
    """How many steps it takes."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    data = TensorDataset(torch.arange(36.0).reshape(12, 3).square() / 36)
    loop = Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(data, batch_size=6)},
        accumulate=2,
        device="cpu",
    )

    def loss_of(batch: Any) -> torch.Tensor:
        return (loop.model(batch[0]) * float(factor())).square().mean() ** power

    for step in loop.steps(2):
        loop.step(loss_of, step.batch)
    return loop.global_step


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(()), np.random.rand, random.random],
    ids=["torch", "numpy", "random"],
)
def test_a_function_that_draws_is_not_accused_of_being_no_mean(draw: Callable[[], Any]) -> None:
    assert train(draw, power=1) == 2


def test_a_function_that_is_no_mean_is_named() -> None:
    with pytest.raises(UserError, match="loss_of gave .* is the mean of its values for two parts"):
        train(lambda: 1.0, power=0.5)
