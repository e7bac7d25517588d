"""The memory of one rank's step, planned beside the training that takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from allhands.planning.dry_step import Workload, dry_steps
from allhands.planning.machines import workspaces
from allhands.planning.own_process import OwnProcess
from allhands.strategies import Strategy


@dataclass(frozen=True)
class StepMemory:
    """Bytes of tensors of one rank.

    Attributes:
        peak: the most in a step, with cuBLAS's workspaces.
        kinds: the same by kind, see `DryStep`.
        at_start: before the first step.
    """

    peak: int
    kinds: dict[str, int]
    at_start: int


def begin_step_memory(
    given: dict[str, Any], strategy: Strategy, workers: int, rank: int, per_host: int, hopper: bool
) -> OwnProcess:
    """Have a process of its own plan the memory of a step; its answer is a `StepMemory`.

    Args:
        given: the training, as `Workload` takes it.
        strategy: of the training.
        workers: how many there are.
        rank: whose step it is.
        per_host: workers of a host.
        hopper: the GPU is of this kind or a later one.
    """
    return OwnProcess(
        step_memory, given, strategy, workers, rank, per_host, workspaces(hopper), gently=True
    )


def step_memory(
    given: dict[str, Any],
    strategy: Strategy,
    workers: int,
    rank: int,
    per_host: int,
    libraries: int,
) -> StepMemory:
    """The memory of the fullest step, planned in this process; see `begin_step_memory`.

    Args:
        libraries: bytes of cuBLAS's workspaces.
    """
    steps = dry_steps(Workload(**given), strategy, workers, rank, per_host)
    fullest = max(steps, key=lambda step: step.peak)
    kinds = {**fullest.kinds, "libraries": libraries}
    return StepMemory(fullest.peak + libraries, kinds, fullest.at_start)
