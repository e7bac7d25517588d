"""Gradients clipped by value are those of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner, UserError, clip_grad_value
from tests.reference import relative_difference
from tests.worlds import in_world

BOUND, BATCH, EPOCHS = 0.02, 8, 2


def parts(batch: int = BATCH) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    data = TensorDataset(torch.randn(30, 5), torch.randint(3, (30,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), DataLoader(data, batch)


def train(distributed: Any = False, batch: int = BATCH) -> dict[str, torch.Tensor]:
    model, optimizer, loader = parts(batch)
    clip_grad_value(optimizer, BOUND)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        loaders={"train": loader},
        num_epochs=EPOCHS,
        distributed=distributed,
    )
    return model.state_dict()


def by_hand(bound: float = BOUND) -> dict[str, torch.Tensor]:
    model, optimizer, loader = parts()
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_value_(model.parameters(), bound)
            optimizer.step()
    return model.state_dict()


def on_workers() -> list[dict[str, torch.Tensor]]:
    return [train(strategy, BATCH // 2) for strategy in ("ddp", "fsdp")]


def test_it_is_the_loop_by_hand() -> None:
    expected = by_hand()
    assert relative_difference(by_hand(1e9), expected) > 1e-2  # it matters
    assert relative_difference(train(), expected) < 1e-6
    for found in in_world(2, on_workers)[0]:
        assert relative_difference(found, expected) < 1e-5


def test_it_can_be_ended_and_what_cannot_be_is_refused() -> None:
    _, optimizer, _ = parts()
    (parameter, *_) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    clip_grad_value(optimizer, 0.5).remove()
    optimizer.step()
    assert float(parameter.grad.max()) == 1
    for arguments, message in (
        ((optimizer, 0), "must be a number above 0"),
        ((parameter, 1.0), "no optimizer of torch.optim"),
    ):
        with pytest.raises(UserError, match=message):
            clip_grad_value(*arguments)
