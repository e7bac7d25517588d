"""Samples mixed in pairs: the same on any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from allhands import Mixup, SupervisedRunner, UserError
from tests.reference import relative_difference
from tests.worlds import in_world


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(30, 5, generator=generator), torch.randint(3, (30,), generator=generator)
    )


def train(distributed: Any = False, batch: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        loaders={"train": DataLoader(Mixup(data(), 3, alpha=1.0), batch, shuffle=True)},
        num_epochs=3,
        distributed=distributed,
    )
    return model.state_dict()


def test_samples_and_classes_are_mixed_by_one_share() -> None:
    plain, mixed = data(), Mixup(data(), 3, alpha=1.0)
    assert len(mixed) == 30
    checked = 0
    for (own, own_class), (x, target) in zip(plain, mixed, strict=True):
        assert target.shape == (3,)
        assert float(target.sum()) == pytest.approx(1)
        share = float(target[own_class])
        if share < 1 - 1e-6:  # mixed with a sample of another class
            others = [share * own + (1 - share) * other for other, _ in plain]
            assert any(torch.allclose(x, other, atol=1e-5) for other in others)
            checked += 1
    assert checked > 5


def test_the_training_is_the_same_on_any_number_of_workers() -> None:
    expected = train()
    for workers in (2, 3):
        for found in in_world(workers, train, "ddp", 6 // workers):
            assert relative_difference(found, expected) < 1e-6


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_what_cannot_be_mixed_is_refused() -> None:
    whole = TensorDataset(torch.ones(3, dtype=torch.int64), torch.ones(3))
    for make, message in (
        (lambda: Mixup(Stream(), 3), "a stream has none"),
        (lambda: Mixup(data(), 1), "num_classes=1"),
        (lambda: Mixup(data(), 3, alpha=0), "alpha must be a number above 0"),
        (lambda: Mixup(data(), 2)[int(data()[:][1].argmax())], "is of class 2"),
        (lambda: Mixup(TensorDataset(torch.ones(3)), 2)[0], "must be a pair"),
        (lambda: Mixup(whole, 2)[0], "floating point tensor"),
    ):
        with pytest.raises(UserError, match=message):
            make()
