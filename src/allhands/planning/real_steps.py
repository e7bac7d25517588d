"""A few real steps of one process, by which times of single operations are corrected: in a step
their data are in no cache, and Python and autograd take their time too."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from allhands.data import map_tensors
from allhands.planning.dry_step import (
    DryStep,
    Workload,
    bound,
    copies,
    dry_step,
    dry_steps,
    dry_world,
)
from allhands.planning.operation import Operation
from allhands.planning.step_correction import StepCorrection
from allhands.planning.step_recorder import UPDATE
from allhands.strategies import Single, Strategy
from allhands.world import World

_WARM, _TURNS = 3, 15
# A part of the batch that is tried too, as micro-batches of a pipeline are parts of it.
_PART = 4
_SPREAD = 0.02
# Samples of steps that give a GPU little to do; BatchNorm wants more than one.
_FEW = 2
_CPU = torch.device("cpu")
_ALONE = Single()


def correction_of(workload: Workload, seconds_of: Callable[[Operation], float]) -> StepCorrection:
    """Take real steps on this machine's processor, with the batch and with a part of it.

    Args:
        workload: what is trained; of a model on the meta device random weights are made.
        seconds_of: an operation alone.
    """
    whole = workload.samples
    part = max(1, whole // _PART)
    few = _part_of(workload, part)
    found = []
    for one in (workload, few):
        taken = _real(one)
        alone = {True: 0.0, False: 0.0}
        counts = {True: 0, False: 0}
        for phase, event in dry_step(one, Single(), 1).events:
            if isinstance(event, Operation):
                alone[phase == UPDATE] += seconds_of(event)
                counts[phase == UPDATE] += 1
        found.append((taken, alone, counts))
    (taken, alone, counts), (taken_few, alone_few, _) = found
    passes = taken.passes
    difference = alone[False] - alone_few[False]
    factor = (passes - taken_few.passes) / difference if difference > 0 else 1.0
    overhead = (passes - factor * alone[False]) / max(1, counts[False])
    if overhead < 0 or factor <= 0:
        factor, overhead = passes / alone[False], 0.0
    beyond = max(0.0, taken.update - alone[True]) / max(1, counts[True])
    return StepCorrection(factor, overhead, beyond, taken.spread)


def launch_of(workload: Workload, device: torch.device) -> float | None:
    """Seconds in which this host hands one operation to a GPU, the mean over real steps of one
    process with few samples, which give the GPU little to do.

    Returns:
        None where the GPU has no room for the model.
    """
    few = _part_of(workload, min(_FEW, workload.samples))
    try:
        taken = _real(few, world=_world_of(device))
    except torch.OutOfMemoryError:
        return None
    count = sum(isinstance(event, Operation) for _, event in dry_step(few, Single(), 1).events)
    return (taken.passes + taken.update) / max(1, count)


def own_seconds(
    workload: Workload,
    strategy: Strategy,
    workers: int,
    per_host: int,
    in_step: Callable[[str, Operation], float],
) -> float:
    """Seconds that a strategy's own code takes in a step on a processor, beside its operations and
    messages: hooks around layers, and what PyTorch does for parts of tensors.

    Real steps of one rank are taken, whose messages go nowhere, and beside them steps of one
    process, by which the two are compared: meanwhile the machine may be as busy as it was not when
    operations were timed.

    Args:
        workload: what is trained.
        strategy: by which.
        workers: ranks of the world.
        per_host: of a host.
        in_step: seconds of an operation in this phase of a step.
    """
    (step,) = dry_steps(workload, strategy, workers, 0, per_host)
    with dry_world(strategy, workers, 0, per_host, workload.backend) as world:
        taken = _real(workload, strategy, world)
    alone = _real(workload)

    def known(one: DryStep) -> float:
        return math.fsum(
            in_step(phase, event) for phase, event in one.events if isinstance(event, Operation)
        )

    slower = known(dry_step(workload, _ALONE, 1)) / (alone.passes + alone.update)
    return max(0.0, slower * (taken.passes + taken.update) - known(step))


def _part_of(workload: Workload, samples: int) -> Workload:
    batch = map_tensors(workload.batch, lambda one: one[:samples])
    return replace(workload, batch=batch, samples=samples)


@dataclass(frozen=True)
class RealStep:
    """Seconds of a step's passes and of its update, the medians of a few; on a GPU those in which
    they are asked for.

    Attributes:
        spread: see `StepCorrection`.
    """

    passes: float
    update: float
    spread: float


def _real(workload: Workload, strategy: Strategy = _ALONE, world: World | None = None) -> RealStep:
    """Take a few steps."""
    world = world or _world_of(_CPU)
    device = world.device
    model, optimizer = copies(workload, lambda tensor: _random(tensor, device))
    group, objective = bound(workload, strategy, world, model, optimizer)
    marks: list[float] = []
    group.optimizer.register_step_pre_hook(lambda *_: marks.append(time.perf_counter()))
    group.begin(0)
    group.train()
    take = group.step_for(objective)
    take.before_first_update = None
    parts = workload.accumulate
    batch = map_tensors(workload.batch, lambda one: one.to(device))
    batches, counts = [batch] * parts, [workload.samples] * parts
    passes, updates = [], []
    for _ in range(_WARM + _TURNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        with group.precision.of_calls(group.model):
            take(batches, counts, sum(counts) * group.placement.shares, False)
        passes.append(marks[-1] - began)
        updates.append(time.perf_counter() - marks[-1])
    found = statistics.median(passes[_WARM:])
    # Half of the width that two thirds of normal numbers have: a step that was disturbed is none.
    low, *_, high = statistics.quantiles(passes[_WARM:], n=6)
    spread = (high - low) / 2 / math.sqrt(found)
    return RealStep(found, statistics.median(updates[_WARM:]), spread)


def _world_of(device: torch.device) -> World:
    return World(0, 0, 0, 1, 1, device, "none", "plan")


def _random(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What a model on the meta device may train from."""
    if tensor.device.type != "meta":
        return tensor.detach().to(device, copy=True)
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=device) * _SPREAD
