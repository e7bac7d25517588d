"""Real steps, and what they say of operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from allhands import FSDP, SupervisedRunner
from allhands.planning import real_steps
from allhands.planning.dry_step import Workload
from allhands.planning.operation import Operation
from allhands.planning.real_steps import correction_of, launch_of, own_seconds
from allhands.planning.step_correction import ALONE, StepCorrection
from allhands.strategies import Single, Strategy


def workload(model: nn.Module) -> Workload:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.zeros(16, 8), torch.zeros(16, 4)
    return Workload(
        model, nn.MSELoss(), optimizer, batch, 16, SupervisedRunner(device="cpu"), backend="gloo"
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_is_tried_and_stays_as_it_is(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    given = workload(model)
    found = correction_of(given, lambda _: 1e-9)
    # Operations that take next to nothing alone: the steps took their time.
    assert found("update", 0.0) > 0
    assert found("forward", 1e-9) > 1e-9
    if device == "cpu":
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert not given.optimizer.state


def test_factor_and_overhead_come_out_of_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in which an operation takes 3 times its time alone, and 2 s more."""
    with torch.device("meta"):
        given = workload(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))

    def alone(operation: Any) -> float:
        return float(operation.moved)

    steps = {}
    for samples in (16, 4):
        sums = {True: 0.0, False: 0.0}
        counts = {True: 0, False: 0}
        part = workload(given.model)
        part = real_steps.replace(
            part, batch=tuple(one[:samples] for one in part.batch), samples=samples
        )
        for phase, event in real_steps.dry_step(part, real_steps.Single(), 1).events:
            sums[phase == "update"] += alone(event)
            counts[phase == "update"] += 1
        passes = 3 * sums[False] + 2 * counts[False]
        update = sums[True] + 0.5 * counts[True]
        steps[samples] = real_steps.RealStep(passes, update, 0.25 if samples == 16 else 0.0)
    monkeypatch.setattr(real_steps, "_real", lambda one: steps[one.samples])
    found = correction_of(given, alone)
    assert found.factor == pytest.approx(3)
    assert found.overhead == pytest.approx(2)
    assert found.update_overhead == pytest.approx(0.5)
    assert found.spread == 0.25


def test_a_correction_by_phase() -> None:
    correction = StepCorrection(2.0, 0.5, 0.25)
    assert correction("backward", 1.0) == 2.5
    assert correction("update", 1.0) == 1.25
    assert ALONE("forward", 1.0) == 1.0


def test_code_of_a_strategy_takes_time_beside_its_operations() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    given = workload(nn.Sequential(model, nn.Linear(8, 4)))
    assert 1e-7 < own_seconds(given, FSDP(), 2, 8, lambda *_: 1e-6) < 10
    assert not torch.distributed.is_initialized()


def test_own_code_is_told_beside_steps_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    given = workload(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))

    def count(strategy: Strategy, workers: int) -> int:
        (step,) = real_steps.dry_steps(given, strategy, workers, 0, 8)
        return sum(isinstance(event, Operation) for _, event in step.events)

    alone, shared = count(Single(), 1), count(FSDP(), 2)
    # On a machine that is so busy that an operation takes 4 s instead of 1.
    busy = {True: 4.0 * alone, False: 4.0 * (shared + 3)}

    def real(_: Workload, strategy: Any = None, world: Any = None) -> real_steps.RealStep:
        return real_steps.RealStep(busy[world is None], 0.0, 0.0)

    monkeypatch.setattr(real_steps, "_real", real)
    assert own_seconds(given, FSDP(), 2, 8, lambda *_: 1.0) == pytest.approx(3)
    busy[False] = 4.0 * (shared - 3)
    assert own_seconds(given, FSDP(), 2, 8, lambda *_: 1.0) == 0


def test_the_host_hands_over_an_operation_in_microseconds() -> None:
    found = launch_of(workload(nn.Linear(8, 4)), torch.device("cpu"))
    assert found is not None
    assert 1e-7 < found < 1e-2
