"""How long a step takes, of what a dry run has seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from allhands.comm.traffic import Collective
from allhands.planning.dry_step import DryStep
from allhands.planning.machines import Links
from allhands.planning.measured_links import MeasuredLinks
from allhands.planning.operation import Operation
from allhands.planning.operation_times import OperationTimes
from allhands.planning.step_recorder import UPDATE

# Seconds in which Python and PyTorch hand over one operation; and between two kernels of a step
# that was captured in a CUDA graph.
EAGER_S = 12e-6
CAPTURED_S = 1.5e-6


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and what they are spent on.

    Attributes:
        compute: of the GPU.
        waiting: for collectives, beyond what computing hides.
        bubble: of a pipeline, in which a stage waits for the others.
        launch: in which the GPU waits for the host.
    """

    compute: float
    waiting: float
    bubble: float = 0.0
    launch: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.waiting + self.bubble + self.launch


def mean_time(kinds: Sequence[tuple[float, StepTime]]) -> StepTime:
    """The mean over kinds of steps, each with its share of all."""

    def mean(part: str) -> float:
        return math.fsum(share * getattr(time, part) for share, time in kinds)

    return StepTime(*(mean(field.name) for field in fields(StepTime)))


@dataclass(frozen=True)
class Places:
    """Which groups hold a step up, and on how many hosts each group is.

    Attributes:
        hosts: by the name of a group.
        blocking: names of groups whose collectives the next operation waits for.
    """

    hosts: Mapping[str, int]
    blocking: frozenset[str]


def step_time(
    step: DryStep,
    times: OperationTimes,
    links: Links | MeasuredLinks,
    places: Places,
    launch: float,
) -> StepTime:
    """The time of a step without a pipeline.

    Two streams, as a GPU has them: one computes, one communicates. A gather of parameters begins
    while the layer before is computed; sums of gradients run beside the backward pass and are
    waited for before the update; collectives of tensor parallelism hold up what follows.

    Args:
        step: what one rank does.
        times: of operations.
        links: that collectives go over.
        places: where groups are.
        launch: seconds in which the host hands over one operation.
    """
    now = free = host = compute = idle = before = 0.0
    for phase, event in step.events:
        if isinstance(event, Operation):
            seconds = times(event)
            host += launch
            if host > now:  # the GPU has nothing to do yet
                idle += host - now
                now = host
            now += seconds
            compute += seconds
            continue
        seconds = seconds_of(event, links, places)
        if event.group in places.blocking or (phase == UPDATE and event.kind != "broadcast"):
            now = free = max(now, free) + seconds
        elif event.kind == "all_gather":
            free = max(free, before) + seconds
            before, now = now, max(now, free)
        else:
            free = max(free, now) + seconds
        if phase == UPDATE:
            now = max(now, free)
    total = max(now, free)
    return StepTime(compute, max(0.0, total - compute - idle), 0.0, idle)


def pipeline_time(
    steps: Sequence[DryStep],
    times: OperationTimes,
    links: Links | MeasuredLinks,
    places: Sequence[Places],
    launch: float,
    waits: float,
) -> StepTime:
    """The time of a step of a pipeline, by the slowest of its stages.

    Args:
        steps: those of some stages.
        times, links, launch: as for `step_time`.
        places: for each stage.
        waits: by how much of a stage's own time it waits for the others.
    """
    found = []
    for step, place in zip(steps, places, strict=True):
        own = [one for one in step.events if not is_message(one[1])]
        time = step_time(replace(step, events=own), times, links, place, launch)
        sends = [one for one in step.transfers if one.kind == "send"]
        sending = sum(seconds_of(one, links, place) for one in sends)
        # Messages run beside the computing of other micro-batches.
        waiting = time.waiting + max(0.0, sending - time.compute)
        busy = time.compute + time.launch
        found.append(StepTime(time.compute, waiting, busy * waits, time.launch))
    return max(found, key=lambda one: one.total)


@dataclass(frozen=True)
class LateExchange:
    """What a step begins to exchange, and a later step waits for.

    Attributes:
        seconds: of the link.
        cpu: of them, those in which the processor that computes is busy with it.
    """

    seconds: float
    cpu: float

    @classmethod
    def of(
        cls, transfers: Sequence[Collective], links: Links | MeasuredLinks, places: Places
    ) -> LateExchange:
        return cls(
            math.fsum(seconds_of(one, links, places) for one in transfers),
            math.fsum(links.cpu(*arguments_of(one, places)) for one in transfers),
        )


def mean_beside_steps(
    kinds: Sequence[tuple[float, StepTime]],
    late: Sequence[tuple[float, LateExchange]],
    overlap: int,
) -> StepTime:
    """The mean over kinds of steps, where some begin exchanges that later steps wait for.

    Args:
        kinds: the share of all steps, and the time without such exchanges.
        late: likewise the share, and what such a step begins.
        overlap: steps that are taken while an exchange is on its way.
    """
    time = mean_time(kinds)
    cpu = math.fsum(share * one.cpu for share, one in late)
    hidden = overlap * (time.total + cpu)
    beyond = math.fsum(share * max(0.0, one.seconds - hidden) for share, one in late)
    # The link carries one exchange after another.
    busy = math.fsum(share * one.seconds for share, one in late) - time.total - cpu
    return replace(time, waiting=time.waiting + cpu + max(beyond, busy, 0.0))


def without_late(step: DryStep) -> tuple[DryStep, list[Collective]]:
    """A step without the collectives of its update that it does not wait for, and these."""
    own = [one for one in step.events if not _is_late(*one)]
    late = [one for phase, one in step.events if _is_late(phase, one)]
    return replace(step, events=own), [one for one in late if isinstance(one, Collective)]


def _is_late(phase: str, event: Operation | Collective) -> bool:
    return phase == UPDATE and isinstance(event, Collective) and event.asynchronous


def is_message(event: Operation | Collective) -> bool:
    """Whether it is sent or received by one other rank."""
    return isinstance(event, Collective) and event.kind in ("send", "recv")


def seconds_of(transfer: Collective, links: Links | MeasuredLinks, places: Places) -> float:
    """Of a collective alone."""
    return links.seconds(*arguments_of(transfer, places))


def arguments_of(transfer: Collective, places: Places) -> tuple[float, str, int, int]:
    """What links want to know of it."""
    hosts = places.hosts.get(transfer.group, 1)
    moved = transfer.received if transfer.kind == "recv" else transfer.sent
    return moved, "send" if is_message(transfer) else transfer.kind, transfer.size, hosts
