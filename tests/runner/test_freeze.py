"""Layers that are frozen for some epochs, as in a loop by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Freeze, SupervisedRunner, UserError
from tests.reference import relative_difference
from tests.worlds import in_world

BATCH, SAMPLES, EPOCHS = 8, 30, 3


def parts() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, TensorDataset(torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,)))


def train(strategy: Any, *callbacks: Freeze, batch: int = BATCH) -> nn.Module:
    model, data = parts()
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loaders={"train": DataLoader(data, batch)},
        num_epochs=EPOCHS,
        distributed=strategy,
        callbacks=list(callbacks),
    )
    return model


def by_hand(frozen: list[str], epochs: int) -> nn.Module:
    model, data = parts()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(EPOCHS):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen or epoch >= epochs)
        for x, y in DataLoader(data, BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def differ(model: nn.Module, other: nn.Module) -> float:
    return relative_difference(model.state_dict(), other.state_dict())


def test_one_process_is_the_loop_by_hand() -> None:
    model = train(False, Freeze("0", epochs=2))
    assert differ(model, by_hand(["0.weight", "0.bias"], 2)) < 1e-6
    assert all(p.requires_grad for p in model.parameters())
    assert differ(train(False, Freeze("2.weight")), by_hand(["2.weight"], EPOCHS)) < 1e-6


def on_workers() -> list[dict[str, torch.Tensor]]:
    return [
        train(strategy, Freeze("0", epochs=2), batch=BATCH // 2).state_dict()
        for strategy in ("ddp", "fsdp", "kvstore")
    ]


def test_on_workers_it_is_the_same() -> None:
    expected = by_hand(["0.weight", "0.bias"], 2).state_dict()
    for found in in_world(2, on_workers)[0]:
        assert relative_difference(found, expected) < 1e-5


def test_what_cannot_be_is_refused() -> None:
    arguments: tuple[str, ...]
    for arguments, message in (
        ((), "name layers of the model"),
        (("layers.1",), "the model has no such layer"),
        (("2.weigth",), "did you mean '2.weight'"),
        (("0", "2"), "nothing of the model would be trained"),
    ):
        with pytest.raises(UserError, match=message):
            train(False, Freeze(*arguments))
    with pytest.raises(UserError, match="epochs=0"):
        Freeze("0", epochs=0)
