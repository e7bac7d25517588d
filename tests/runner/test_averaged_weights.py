"""Averages of the weights, evaluated and left in the model, as a loop by hand has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import AveragedWeights, Callback, SupervisedRunner, UserError
from tests.reference import relative_difference
from tests.runner.problems import StopAt
from tests.worlds import in_world

EPOCHS, BATCH, SAMPLES = 3, 8, 30


def parts() -> tuple[nn.Module, TensorDataset, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,))
    return model, TensorDataset(x, y), TensorDataset(x[:13], y[:13])


def train(
    strategy: Any, *callbacks: Callback, batch: int = BATCH, **options: Any
) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, data, valid = parts()
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        loaders={"train": DataLoader(data, batch), "valid": DataLoader(valid, batch)},
        num_epochs=EPOCHS,
        distributed=strategy,
        callbacks=list(callbacks),
        **options,
    )
    return model.state_dict(), history["valid"]["loss"]


def by_hand(decay: float | None, start: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, data, valid = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    average: list[torch.Tensor] = []
    step = count = 0
    losses = []
    for _ in range(EPOCHS):
        for x, y in DataLoader(data, BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            if step < start:
                continue
            count += 1
            own = [p.detach() for p in model.parameters()]
            if not average:
                average = [p.clone() for p in own]
                continue
            share = 1 / count if decay is None else 1 - decay
            average = [a + share * (p - a) for a, p in zip(average, own, strict=True)]
        before = [p.detach().clone() for p in model.parameters()]
        load(model, average or before)
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(valid[:][0]), valid[:][1])))
        load(model, before)
    load(model, average)
    return model.state_dict(), losses


def load(model: nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def assert_same(
    found: tuple[dict[str, torch.Tensor], list[float]],
    expected: tuple[dict[str, torch.Tensor], list[float]],
) -> None:
    assert relative_difference(found[0], expected[0]) < 1e-5
    assert found[1] == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.parametrize(("decay", "start"), [(0.9, 1), (None, 5), (0.5, 1000)])
def test_one_process_is_the_loop_by_hand(decay: float | None, start: int) -> None:
    expected = by_hand(decay, start) if start < 1000 else train(False)
    assert_same(train(False, AveragedWeights(decay, start)), expected)


def on_workers(strategies: list[str]) -> list[Any]:
    return [
        train(
            strategy,
            AveragedWeights(0.9),
            batch=BATCH if strategy == "pipeline" else BATCH // 2,
        )
        for strategy in strategies
    ]


def test_on_workers_it_is_the_same() -> None:
    strategies = ["ddp", "fsdp", "kvstore", "pipeline"]
    for found in in_world(2, on_workers, strategies)[0]:
        assert_same(found, by_hand(0.9, 1))


def test_a_resumed_training_goes_on_with_the_average(tmp_path: Path) -> None:
    train(False, AveragedWeights(0.9), StopAt(6), logdir=tmp_path)
    found = train(False, AveragedWeights(0.9), Callback(), logdir=tmp_path, resume="auto")
    assert_same(found, by_hand(0.9, 1))


def test_the_trainings_own_weights_are_left_where_that_is_asked_for() -> None:
    weights, losses = train(False, AveragedWeights(0.9, load_at_end=False))
    assert relative_difference(weights, train(False)[0]) == 0
    assert losses == pytest.approx(by_hand(0.9, 1)[1], rel=1e-5)


def test_what_cannot_be_is_refused() -> None:
    arguments: dict[str, Any]
    for arguments, message in (
        ({"decay": 1.0}, "decay must be a number between 0 and 1, such as 0.999"),
        ({"start": 0}, "start=0"),
        ({"every": 1.5}, "every=1.5"),
    ):
        with pytest.raises(UserError, match=message):
            AveragedWeights(**arguments)
    with pytest.raises(UserError, match=r"Write AveragedWeights\(load_at_end=False\)"):
        train(False, AveragedWeights(), load_best_on_end=True)
