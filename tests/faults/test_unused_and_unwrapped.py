"""Gradients that are not reduced: unused, sometimes used, frozen and bypassed parameters.

Kinds of fault: pytorch/pytorch#112152 (a declared layer that is not used), pytorch/pytorch#69031
(used in an earlier micro-batch
only), huggingface/trl#5282 and kohya-ss/sd-scripts#989 (the model called past its wrapper),
open-mmlab/mmdetection#2153 (an error without names). More are in tests/strategies/test_ddp.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from allhands import Callback, SupervisedRunner
from tests.faults.probes import Found, probe, size, train
from tests.reference import Slope

pytestmark = pytest.mark.serial


class Sometimes(nn.Module):
    """Uses one parameter always, another one only where `when` says so."""

    def __init__(self, when: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.zeros(()))
        self.sometimes = nn.Parameter(torch.zeros(()))
        self.when = when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always * x + (self.sometimes * x if self.when(x) else 0.0)

    def gradients(self) -> list[float]:
        return [-float(self.always.detach()), -float(self.sometimes.detach())]


def small(x: torch.Tensor) -> bool:
    return float(x[0]) < 100


def never(x: torch.Tensor) -> bool:
    return False


def small_then_large() -> torch.Tensor:
    """Every rank's first micro-batch holds a small number, its second one a large number."""
    return torch.cat([torch.tensor([rank + 1.0, 100.0 + rank]) for rank in range(size())])


@probe
def used_in_the_first_micro_batch() -> list[float]:
    model, x = Sometimes(small), small_then_large()
    train(model, (x, x), 1, accumulate=2)
    return model.gradients()


def test_a_parameter_used_only_in_an_earlier_micro_batch_is_reduced(found: Found) -> None:
    workers = found.workers
    first, second = sum(range(1, workers + 1)), sum(100 + rank for rank in range(workers))
    expected = [(first + second) / (2 * workers), first / (2 * workers)]
    assert found(used_in_the_first_micro_batch) == [pytest.approx(expected)] * workers


@probe
def unused_later() -> list[float]:
    """Used in the first step by all ranks, in the second by none."""
    model, x = Sometimes(small), torch.cat([torch.ones(size()), torch.full((size(),), 100.0)])
    train(model, (x, x), 1)
    return model.gradients()


def test_a_parameter_that_is_unused_from_some_step_on_is_left_alone(found: Found) -> None:
    assert found(unused_later) == [pytest.approx([101.0, 1.0])] * found.workers


class Inner(SupervisedRunner):
    """Calls a method of the model, and not the model."""

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return model.forward(batch[0]), batch[1]


@probe
def bypassed() -> float:
    model, x = Slope(), torch.arange(1.0, size() + 1)
    train(model, (x, x), 1, runner=Inner(device="cpu"))
    return -float(model.w.detach())


def test_a_loss_through_a_method_of_the_model_is_exchanged(found: Found) -> None:
    assert found(bypassed) == [pytest.approx((found.workers + 1) / 2)] * found.workers


class Switch(Callback):
    """Freezes or unfreezes a parameter after the first epoch."""

    def __init__(self, requires_grad: bool) -> None:
        self.requires_grad = requires_grad

    def on_epoch_end(self, training: Any) -> None:
        training.model.sometimes.requires_grad_(self.requires_grad)


@probe
def frozen_and_unfrozen() -> list[list[float]]:
    found = []
    for requires_grad in (False, True):
        model, x = Sometimes(lambda x: True), torch.arange(1.0, size() + 1)
        model.sometimes.requires_grad_(not requires_grad)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        train(model, (x, x), 1, epochs=2, callbacks=[Switch(requires_grad)], optimizer=optimizer)
        found.append(model.gradients())
    return found


def test_a_parameter_may_be_frozen_and_unfrozen_between_epochs(found: Found) -> None:
    """Two steps with the gradient m and momentum 0.5 are m + 1.5 m; the frozen parameter takes one
    of them."""
    mean = (found.workers + 1) / 2
    for frozen, unfrozen in found(frozen_and_unfrozen):
        assert frozen == pytest.approx([2.5 * mean, mean])
        assert unfrozen == pytest.approx([2.5 * mean, mean])


@probe
def other_weights_on_each_rank() -> dict[str, torch.Tensor]:
    """As scripts without a seed make them."""
    import allhands

    world = allhands.current_world()
    assert world is not None
    torch.default_generator.manual_seed(world.rank)
    model = nn.Linear(2, 1)
    initial = model.weight.detach().clone()
    train(model, (torch.ones(6, 2), torch.ones(6, 1)), 1, nn.MSELoss(), lr=0.0)
    return {"initial": initial, "trained": model.weight.detach()}


def test_all_ranks_begin_with_rank_0s_weights(found: Found) -> None:
    ranks = found(other_weights_on_each_rank)
    for result in ranks:
        assert torch.equal(result["trained"], ranks[0]["initial"])


@probe
def one_rank_only() -> list[float]:
    """Only the ranks whose number is small use the parameter."""
    model, x = Sometimes(small), torch.tensor([1.0, *[100.0] * (size() - 1)])
    train(model, (x, x), 1)
    return model.gradients()


def test_a_parameter_used_on_one_rank_only_counts_as_zero_on_the_others(found: Found) -> None:
    workers = found.workers
    assert (
        found(one_rank_only)
        == [pytest.approx([(1 + 100 * (workers - 1)) / workers, 1 / workers])] * workers
    )
