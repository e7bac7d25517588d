"""Schedules that advance once a worker or once a micro-batch; learning rates scaled behind the
user's back.

Kinds of fault: huggingface/accelerate#662 and #1382, huggingface/transformers#24088 (world size),
tracel-ai/burn#5695
(micro-batches), horovod/horovod#1542 (scaled rates).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, Callback, SupervisedRunner
from tests.faults.probes import Found, probe, size
from tests.reference import Slope, mean_output

pytestmark = pytest.mark.serial


class Rates(Callback):
    """The learning rate in force after each optimizer step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, training: Any) -> None:
        self.seen.append(round(training.optimizer.param_groups[0]["lr"], 6))


def rates(
    make: Any, samples: int, accumulate: int, epochs: int, period: str | None = None
) -> dict[str, Any]:
    model, seen = Slope(), Rates()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1.0), torch.arange(1.0, samples + 1)
    scheduler = make(optimizer)
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=mean_output,
        optimizer=optimizer,
        callbacks=[seen],
        accumulate=accumulate,
        distributed=DDP(),
        loaders={"train": DataLoader(TensorDataset(x, x), 1)},
        num_epochs=epochs,
        scheduler=(scheduler, period) if period else scheduler,
    )
    return {"rates": seen.seen, "steps": history["step"], "first": history["lr"][0]}


@probe
def inverse() -> dict[str, Any]:
    """12 samples in batches of 1, two accumulated: 1/(1+step)."""
    return rates(
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        12,
        2,
        2,
        "step",
    )


def test_a_schedule_advances_once_an_optimizer_step_whatever_the_world_and_the_accumulation(
    found: Found,
) -> None:
    steps = 12 // (2 * found.workers)
    for result in found(inverse):
        assert result["steps"] == [steps, 2 * steps]
        assert result["rates"] == [round(1 / (1 + step), 6) for step in range(1, 2 * steps + 1)]


def test_the_learning_rate_is_the_users_whatever_the_world(found: Found) -> None:
    assert [result["first"] for result in found(inverse)] == [1.0] * found.workers


@probe
def warm_up() -> dict[str, Any]:
    """10 optimizer steps of windows of 4."""
    return rates(
        lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10),
        40 * size(),
        4,
        1,
        "step",
    )


def test_a_warm_up_of_ten_steps_ends_after_ten_optimizer_steps(found: Found) -> None:
    for result in found(warm_up):
        assert result["rates"] == [round(0.1 + 0.09 * step, 6) for step in range(1, 11)]


@probe
def short_windows() -> dict[str, Any]:
    """3 batches a rank in windows of 2: the short window is a step as well."""
    return rates(lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5), 3 * size(), 2, 2, "step")


def test_a_short_window_advances_the_schedule_once(found: Found) -> None:
    assert [result["rates"] for result in found(short_windows)] == [
        [0.5, 0.25, 0.125, 0.0625]
    ] * found.workers


@probe
def by_epoch() -> dict[str, Any]:
    return rates(
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 2], 0.1), 2 * size(), 1, 3
    )


def test_an_epoch_schedule_advances_once_an_epoch(found: Found) -> None:
    assert [result["rates"] for result in found(by_epoch)] == [
        [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    ] * found.workers
