"""Own steps of `local_sgd` that are replayed, with its exchanges between them. On a processor a
graph is the function itself; what it would read by address must lie where it lay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import LocalSGD, PerTarget, SupervisedRunner
from allhands.loop import optimizer_group
from allhands.step import captured
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


def addresses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [tensor.data_ptr() for tensor in (*model.parameters(), *states)]


class Graphs:
    """Stands for CUDA graphs of the steps of a model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.replays = model, optimizer, 0
        self.steps: list[captured.CapturedSteps] = []

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        captured_at = addresses(self.model, self.optimizer)

        def replay() -> None:
            assert addresses(self.model, self.optimizer) == captured_at
            self.replays += 1
            with self.steps[-1].optimizer.capturable():
                function()

        return replay


def trained(
    strategy: Any, captures: bool, criterion: nn.Module
) -> tuple[dict[str, torch.Tensor], int]:
    """The weights, and how many steps were replayed."""
    model, optimizer = made()
    graphs = Graphs(model, optimizer)

    class Captured(captured.CapturedSteps):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, capture=graphs, **options)
            graphs.steps.append(self)

    with ExitStack() as stack:
        if captures:
            patch = mock.patch.object
            stack.enter_context(patch(optimizer_group, "captures_steps", lambda *_: True))
            stack.enter_context(patch(optimizer_group, "CapturedSteps", Captured))
        SupervisedRunner().train(
            model=model,
            criterion=criterion,
            optimizer=optimizer,
            loaders={"train": DataLoader(data(), 4, shuffle=True), "valid": DataLoader(data(), 20)},
            num_epochs=4,
            clip_norm=0.5,
            distributed=strategy,
        )
    return model.state_dict(), graphs.replays


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
