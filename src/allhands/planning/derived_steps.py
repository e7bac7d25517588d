"""Steps of more copies of a model, derived from a step of few copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from allhands.comm.traffic import Collective
from allhands.planning.candidates import Candidate
from allhands.planning.dry_step import DryStep, Workload, dry_steps
from allhands.planning.operation import Operation
from allhands.planning.step_recorder import GroupRanks
from allhands.strategies.degrees import AXES, Degrees

_COPIES = "dp_replicate"
# Collectives whose payload is that of one rank, however many ranks there are.
_OF_ONE = frozenset({"all_reduce", "broadcast"})

#: Takes a step of each kind: workload, candidate, GPUs, rank and GPUs of a host.
Taken = Callable[[Workload, Candidate, int, int, int], list[DryStep]]


def taken(
    workload: Workload, candidate: Candidate, gpus: int, rank: int, per_host: int
) -> list[DryStep]:
    return dry_steps(workload, candidate.strategy, gpus, rank, per_host)


class DerivedSteps:
    """Steps of one model, each taken once for the same shards, slices and stages.

    Another number of whole copies changes the sizes of groups, and nothing of what a rank holds,
    computes and hands to a collective.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[Any, ...], tuple[Degrees, list[DryStep]]] = {}

    def __call__(
        self, workload: Workload, candidate: Candidate, gpus: int, rank: int, per_host: int
    ) -> list[DryStep]:
        degrees = candidate.degrees(gpus)
        if degrees.replicate < 2 or not candidate.strategy.copies_alike:
            return taken(workload, candidate, gpus, rank, per_host)
        key = (
            str({name: one for name, one in candidate.lines.items() if name != "dp"}),
            degrees._replace(replicate=1),
            workload.activation_checkpointing,
            rank == 0,
            rank * degrees.pp // gpus,  # the stage
        )
        if key in self._taken:
            before, steps = self._taken[key]
            derived = [with_copies(step, before, degrees) for step in steps]
            if None not in derived:
                return [step for step in derived if step is not None]
        steps = taken(workload, candidate, gpus, rank, per_host)
        self._taken[key] = degrees, steps
        return steps


def with_copies(step: DryStep, before: Degrees, after: Degrees) -> DryStep | None:
    """The step with another number of whole copies of the model.

    Args:
        step: of `before.replicate` copies, at least two.
        before, after: workers along each axis; they differ in `replicate` alone.

    Returns:
        None where what a rank sends depends on the number of copies in another way.
    """
    groups: GroupRanks = {}
    sizes: dict[str, int] = {}
    for name, ranks in step.groups.items():
        at = [_coordinates(before, rank) for rank in ranks]
        over = len({one[_COPIES] for one in at}) > 1
        kept = {_without(one) for one in at}
        if over and len(at) != len(kept) * before.replicate:
            return None
        copies = range(after.replicate) if over else [_moved(at[0][_COPIES], before, after)]
        groups[name] = tuple(
            sorted(_rank(after, dict(one) | {_COPIES: copy}) for one, copy in product(kept, copies))
        )
        sizes[name] = len(groups[name])
    events: list[tuple[str, Operation | Collective]] = []
    for phase, event in step.events:
        if isinstance(event, Collective) and (size := sizes[event.group]) != event.size:
            if event.kind not in _OF_ONE:
                return None
            events.append((phase, replace(event, size=size)))
            continue
        events.append((phase, event))
    return replace(step, events=events, groups=groups)


def _coordinates(degrees: Degrees, rank: int) -> dict[str, int]:
    return {axis: index for axis, (index, _) in degrees.coordinates(rank).items()}


def _without(at: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((axis, at[axis]) for axis in AXES if axis != _COPIES)


def _moved(copy: int, before: Degrees, after: Degrees) -> int:
    return after.replicate - 1 if copy == before.replicate - 1 else copy


def _rank(degrees: Degrees, at: Mapping[str, int]) -> int:
    rank = 0
    for axis, count in zip(AXES, degrees, strict=True):
        rank = rank * count + at[axis]
    return rank
