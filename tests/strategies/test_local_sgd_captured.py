"""Own steps of `local_sgd` that are replayed, with its exchanges between them. On a processor a
graph is the function itself; what it would read by address must lie where it lay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import LocalSGD, PerTarget, SupervisedRunner
from allhands.step import CapturedSteps
from allhands.step.cuda_graphs import Graphs
from tests.function_graphs import FunctionGraphs, captured_on_processors
from tests.reference import relative_difference
from tests.worlds import in_world

SAMPLES = 93  # uneven over two workers


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=drawn), torch.randint(3, (SAMPLES,), generator=drawn)
    )


def addresses(steps: CapturedSteps) -> list[int]:
    states = [
        value
        for state in steps.optimizer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [tensor.data_ptr() for tensor in (*steps.module.parameters(), *states)]


class AtAddresses(FunctionGraphs):
    """Looks where tensors of the steps lie."""

    def __call__(self, *given: Any) -> Graphs:
        self.captured_at = addresses(self.steps)
        return super().__call__(*given)

    def replayed(self, function: Callable[[], None]) -> None:
        assert addresses(self.steps) == self.captured_at
        super().replayed(function)


def trained(
    strategy: Any, captures: bool, criterion: nn.Module
) -> tuple[dict[str, torch.Tensor], int]:
    """The weights, and how many steps were replayed."""
    model, optimizer = made()
    capturing = captured_on_processors(AtAddresses) if captures else nullcontext([])
    with capturing as graphs:
        SupervisedRunner().train(
            model=model,
            criterion=criterion,
            optimizer=optimizer,
            loaders={"train": DataLoader(data(), 4, shuffle=True), "valid": DataLoader(data(), 20)},
            num_epochs=4,
            clip_norm=0.5,
            distributed=strategy,
        )
    return model.state_dict(), sum(one.replays for one in graphs)


def both(strategy: Any, criterion: nn.Module) -> tuple[float, int]:
    eager, _ = trained(strategy, False, criterion)
    found, replays = trained(strategy, True, criterion)
    return relative_difference(found, eager), replays


@pytest.mark.serial
@pytest.mark.parametrize(
    ("strategy", "bound"),
    [
        (LocalSGD(every=5), 1e-5),
        (LocalSGD(every=4, outer="nesterov", fragments=2), 1e-5),
        (LocalSGD(every=6, overlap=2, mix=0.5), 1e-5),
        # The last bits of a fused update let numbers be rounded to the next of 255.
        (LocalSGD(every=3, compress="int8"), 1e-2),
    ],
    ids=["mean", "nesterov", "overlap", "int8"],
)
def test_replayed_steps_are_the_eager_ones(strategy: Any, bound: float) -> None:
    for difference, replays in in_world(2, both, strategy, nn.MultiMarginLoss()):
        assert replays > 30
        assert difference < bound


COUNTED = {
    "targets": nn.CrossEntropyLoss(ignore_index=0),
    "pairs": PerTarget(nn.CrossEntropyLoss(ignore_index=0), ignore_index=0),
}


@pytest.mark.serial
@pytest.mark.parametrize("criterion", COUNTED.values(), ids=COUNTED)
def test_what_losses_count_weighs_the_ranks(criterion: nn.Module) -> None:
    """Targets of class 0 do not count, and each rank has others."""
    for difference, replays in in_world(2, both, LocalSGD(every=5), criterion):
        assert difference < 1e-5
        assert replays > 20


@pytest.mark.gpu(2)
@pytest.mark.serial
@pytest.mark.parametrize("criterion", COUNTED.values(), ids=COUNTED)
def test_on_gpus_what_losses_count_weighs_the_ranks(criterion: nn.Module) -> None:
    """A graph does not know the number that it was captured with."""
    eager, found = (on_gpus(criterion, step) for step in ("eager", "graph"))
    assert relative_difference(found, eager) < 1e-5


def on_gpus(criterion: nn.Module, step: str) -> dict[str, torch.Tensor]:
    model, optimizer = made()
    SupervisedRunner(device="cuda").train(
        model=model,
        criterion=criterion,
        optimizer=optimizer,
        loaders={"train": DataLoader(data(), 4, shuffle=True)},
        num_epochs=4,
        clip_norm=0.5,
        distributed=LocalSGD(every=5),
        workers=2,
        step=step,
    )
    return model.state_dict()
