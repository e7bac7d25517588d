"""Gradients that are not reduced: unused, sometimes used, frozen and bypassed parameters.

Kinds of fault: pytorch/pytorch#112152 (a declared layer that is not used), pytorch/pytorch#69031 (used in an earlier micro-batch
only), huggingface/trl#5282 and kohya-ss/sd-scripts#989 (the model called past its wrapper), open-mmlab/mmdetection#2153 (an
error without names). More are in tests/strategies/test_ddp.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, Callback, SupervisedRunner, UserError, WorldError
from tests.faults.probes import Found, probe, refusal, size, train
from tests.reference import Slope
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.timeout(400)]


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
    train(model, (x, x), 1, accumulate=2, strategy=DDP(find_unused_parameters=size() > 1))
    return model.gradients()


def test_a_parameter_used_only_in_an_earlier_micro_batch_is_reduced(found: Found) -> None:
    workers = found.workers
    first, second = sum(range(1, workers + 1)), sum(100 + rank for rank in range(workers))
    expected = [(first + second) / (2 * workers), first / (2 * workers)]
    assert found(used_in_the_first_micro_batch) == [pytest.approx(expected)] * workers


@probe
def used_in_the_first_micro_batch_without_the_option() -> str:
    model, x = Sometimes(small), small_then_large()
    return refusal(lambda: train(model, (x, x), 1, accumulate=2))


def test_without_the_option_it_is_named_in_that_step(found: Found) -> None:
    for message in found(used_in_the_first_micro_batch_without_the_option):
        assert ("were not reduced: sometimes." in message) == (found.workers > 1)


@probe
def unused_later() -> str:
    """Used in the first step by all ranks, in the second by none."""
    x = torch.cat([torch.ones(size()), torch.full((size(),), 100.0)])
    return refusal(lambda: train(Sometimes(small), (x, x), 1))


def test_a_parameter_that_is_unused_from_some_step_on_is_named(found: Found) -> None:
    for message in found(unused_later):
        assert ("were not reduced: sometimes." in message) == (found.workers > 1)
        assert ("DDP(find_unused_parameters=True)" in message) == (found.workers > 1)


@probe
def unused_with_a_static_graph() -> list[float]:
    model, x = Sometimes(never), torch.arange(1.0, 2 * size() + 1)
    train(model, (x, x), 2, strategy=DDP(static_graph=True), epochs=2)
    return model.gradients()


def test_a_static_graph_may_leave_parameters_out(found: Found) -> None:
    assert found(unused_with_a_static_graph) == [[2 * (found.workers + 0.5), 0.0]] * found.workers


@probe
def static_graph_that_accumulates() -> str:
    x = torch.arange(1.0, 2 * size() + 1)
    return refusal(lambda: train(Slope(), (x, x), 1, accumulate=2, strategy=DDP(static_graph=True)))


def test_a_static_graph_that_accumulates_is_refused(found: Found) -> None:
    for message in found(static_graph_that_accumulates):
        assert ("DDP(static_graph=True) must exchange" in message) == (found.workers > 1)


class Inner(SupervisedRunner):
    """Calls what is inside the wrapper."""

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return getattr(model, "module", model)(batch[0]), batch[1]


@probe
def bypassed() -> str:
    x = torch.arange(1.0, 2 * size() + 1)
    return refusal(lambda: train(Slope(), (x, x), 1, runner=Inner(device="cpu")))


def test_a_loss_through_the_inner_module_is_refused_in_the_first_step(found: Found) -> None:
    for message in found(bypassed):
        assert ("did not call the model that handle_batch is given" in message) == (found.workers > 1)


class Switch(Callback):
    """Freezes or unfreezes a parameter after the first epoch."""

    def __init__(self, requires_grad: bool) -> None:
        self.requires_grad = requires_grad

    def on_epoch_end(self, training: Any) -> None:
        training.model.sometimes.requires_grad_(self.requires_grad)


def switched(requires_grad: bool) -> str:
    model, x = Sometimes(lambda x: True), torch.arange(1.0, 2 * size() + 1)
    model.sometimes.requires_grad_(not requires_grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        train(model, (x, x), 1, epochs=2, callbacks=[Switch(requires_grad)], optimizer=optimizer)
    except (UserError, WorldError) as error:
        return str(error)
    return ""


@probe
def frozen_and_unfrozen() -> list[str]:
    return [switched(False), switched(True)]


def test_freezing_and_unfreezing_during_a_training_is_named(found: Found) -> None:
    for frozen, unfrozen in found(frozen_and_unfrozen):
        assert ("were frozen (requires_grad=False) after the training had begun: sometimes" in frozen) == (found.workers > 1)
        assert ("first 'sometimes', which was frozen" in unfrozen) == (found.workers > 1)


@probe
def other_weights_on_each_rank() -> dict[str, torch.Tensor]:
    """As scripts without a seed make them."""
    import allhands

    world = allhands.current_world()
    assert world is not None
    torch.manual_seed(world.rank)
    model = nn.Linear(2, 1)
    initial = model.weight.detach().clone()
    train(model, (torch.ones(6, 2), torch.ones(6, 1)), 1, nn.MSELoss(), lr=0.0)
    return {"initial": initial, "trained": model.weight.detach()}


def test_all_ranks_begin_with_rank_0s_weights(found: Found) -> None:
    ranks = found(other_weights_on_each_rank)
    for result in ranks:
        assert torch.equal(result["trained"], ranks[0]["initial"])


def one_rank_only() -> None:
    """Rank 0 uses the parameter, rank 1 does not: rank 0 waits for it."""
    x = torch.tensor([1.0, 100.0])
    model = Sometimes(small)
    SupervisedRunner(device="cpu").train(
        model=model, criterion=lambda output, target: output.mean(), optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loaders={"train": DataLoader(TensorDataset(x, x), 1)},
    )  # fmt: skip


def test_a_parameter_unused_on_one_rank_only_is_named_within_seconds() -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match="on rank 1 these parameters took no part in the loss.*: sometimes"):
        in_world(2, one_rank_only)
    assert time.monotonic() - started < 40
