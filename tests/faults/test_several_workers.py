"""Kinds of fault that trainers of this kind have had, at 1, 2 and 3 workers: each with the value that is right.

The others of that catalogue are tested beside the code that they are about: weighting, clipping and ignored targets in
`tests/strategies/test_ddp.py` and `tests/step`, order, padding and streams in `tests/data`, metrics and resume in
`tests/runner`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, Callback, SupervisedRunner
from tests.reference import Slope, mean_output
from tests.worlds import in_world

pytestmark = pytest.mark.serial


class Rates(Callback):
    """The learning rate in force at each optimizer step, and the batches that the model saw on this rank."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, training: Any) -> None:
        self.seen.append(round(training.optimizer.param_groups[0]["lr"], 6))


def numbers(samples: int) -> TensorDataset:
    x = torch.arange(1.0, samples + 1)
    return TensorDataset(x, x)


def scheduled() -> dict[str, Any]:
    """A schedule that advances each step: 12 samples, batches of 1, 2 accumulated."""
    model, rates = Slope(), Rates()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    history = SupervisedRunner(device="cpu").train(
        model=model, criterion=mean_output, optimizer=optimizer, callbacks=[rates], accumulate=2, distributed=DDP(), num_epochs=2,
        scheduler=(lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)), "step"),
        loaders={"train": DataLoader(numbers(12), 1)},
    )  # fmt: skip
    return {"rates": rates.seen, "steps": history["step"], "first": history["lr"][0]}


class OnlyInTheFirst(nn.Module):
    """Uses one parameter in the first micro-batch of a step only, another always."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.zeros(()))
        self.sometimes = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always * x + (self.sometimes * x if float(x[0]) < 100 else 0.0)


def used_in_one_micro_batch() -> list[float]:
    """Every rank's first micro-batch holds small numbers, its second one large numbers."""
    import allhands

    world = allhands.current_world()
    assert world is not None
    size = world.world_size
    x = torch.cat([torch.tensor([rank + 1.0, 100.0 + rank]) for rank in range(size)])
    model = OnlyInTheFirst()
    SupervisedRunner(device="cpu").train(
        model=model, criterion=mean_output, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), accumulate=2,
        loaders={"train": DataLoader(TensorDataset(x, x), 1)}, distributed=DDP(find_unused_parameters=size > 1),
    )  # fmt: skip
    return [float(model.always.detach()), float(model.sometimes.detach())]


class Masks(nn.Module):
    """Keeps the dropout masks that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.drawn: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.functional.dropout(torch.ones(16), 0.5, self.training)
        self.drawn.append(mask.tolist())
        return (x[:, None] * self.scale * mask).sum(1)


def dropout_masks() -> list[list[float]]:
    torch.manual_seed(0)  # as scripts do, on every rank alike
    model = Masks()
    SupervisedRunner(device="cpu").train(
        model=model, criterion=mean_output, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), num_epochs=2,
        loaders={"train": DataLoader(numbers(12), 2)}, distributed=DDP(),
    )  # fmt: skip
    return model.drawn


def everything() -> dict[str, Any]:
    return {"schedule": scheduled(), "one micro-batch": used_in_one_micro_batch(), "masks": [dropout_masks(), dropout_masks()]}


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return in_world(request.param, everything)


def test_a_schedule_advances_once_an_optimizer_step_whatever_the_world_and_the_accumulation(ranks: list[dict[str, Any]]) -> None:
    steps = 12 // (2 * len(ranks))
    for found in ranks:
        assert found["schedule"]["steps"] == [steps, 2 * steps]
        assert found["schedule"]["rates"] == [round(1 / (1 + step), 6) for step in range(1, 2 * steps + 1)]


def test_the_learning_rate_is_the_users_whatever_the_world(ranks: list[dict[str, Any]]) -> None:
    assert [found["schedule"]["first"] for found in ranks] == [1.0] * len(ranks)


def test_a_parameter_used_only_in_an_earlier_micro_batch_is_reduced(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    small, large = sum(range(1, size + 1)), sum(100 + rank for rank in range(size))
    for found in ranks:
        assert found["one micro-batch"] == pytest.approx([-(small + large) / (2 * size), -small / (2 * size)])


def test_dropout_differs_between_ranks_steps_and_epochs_and_repeats_with_the_run(ranks: list[dict[str, Any]]) -> None:
    first = [tuple(mask) for found in ranks for mask in found["masks"][0]]
    assert len(set(first)) == len(first)
    for found in ranks:
        assert found["masks"][0] == found["masks"][1]
