"""How long a step takes on processors, where one thread computes, hands over operations and waits,
and gloo's threads share its core."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from allhands.comm.traffic import Collective
from allhands.planning.dry_step import DryStep
from allhands.planning.machines import Links
from allhands.planning.measured_links import MeasuredLinks
from allhands.planning.operation import Operation
from allhands.planning.operation_times import OperationTimes
from allhands.planning.step_recorder import UPDATE
from allhands.planning.timing import Places, StepTime, arguments_of, is_message, seconds_of


def cpu_step_time(
    step: DryStep, times: OperationTimes, links: Links | MeasuredLinks, places: Places
) -> StepTime:
    """The time of a step of `step`'s rank, whose collectives the other ranks begin at the same
    moment.

    A collective that PyTorch is asked to wait for holds up the thread. One that it is not asked to
    wait for goes on beside the computing, after those before it, and is waited for before the
    update; meanwhile the processor's time that it takes is missing to the computing. A collective
    begins when the last rank is there: ranks do not take equally long for what they compute.
    """
    now = free = compute = apart = 0.0  # `apart`: computed since ranks have waited for one another
    for phase, event in step.events:
        if isinstance(event, Operation):
            if phase == UPDATE:
                now = max(now, free)
            seconds = times.in_step(phase, event)
            now += seconds
            compute += seconds
            apart += seconds
            continue
        seconds = seconds_of(event, links, places)
        last = now + times.correction.later(apart, event.size)
        if event.asynchronous and phase != UPDATE:
            free = max(free, last) + seconds
            now += links.cpu(*arguments_of(event, places))
        else:
            now = free = max(last, free) + seconds
            apart = 0.0
    total = max(now, free)
    return StepTime(compute, total - compute)


@dataclass
class _Message:
    """When its two ranks are ready for it, and when it has come; None before that is known.

    Attributes:
        sent: the sender has it.
        asked: the receiver's word that it is ready has come to the sender.
        end: all of it has come.
    """

    sent: float | None = None
    asked: float | None = None
    end: float | None = None

    def end_before(self, now: float) -> float:
        """When a word that its sender sends can come at the earliest: behind it where it is on its
        way."""
        if self.sent is None or self.asked is None or self.end is None:
            return now
        return self.end if self.sent <= now and self.asked < now else now


@dataclass
class _StageWait:
    """A rank goes on at a time, or later, when messages have come."""

    now: float
    messages: Sequence[_Message] = ()

    @property
    def ready(self) -> bool:
        return all(one.end is not None for one in self.messages)

    @property
    def until(self) -> float:
        return max([self.now, *(one.end or 0.0 for one in self.messages)])


class PipelineSimulation:
    """The steps of all ranks of a pipeline side by side.

    A message goes as gloo sends it: once the sender has the receiver's word that it is ready, and
    the link is free in its direction. That word takes the same connection as what the receiver
    sends, and comes behind messages that it has begun to send. What is received is waited for at
    once, together with what is sent along with it; what is sent alone is waited for before the next
    message. So do PyTorch's schedules.

    Args:
        steps: of each rank, in order.
        times: of operations.
        links: that messages go over.
        places: of each rank's groups.
    """

    def __init__(
        self,
        steps: Sequence[DryStep],
        times: OperationTimes,
        links: Links | MeasuredLinks,
        places: Sequence[Places],
    ) -> None:
        self._steps, self._times, self._links, self._places = steps, times, links, places
        self._messages: dict[tuple[int, int], list[_Message]] = {}
        self._posted: Counter[tuple[int, int, str]] = Counter()
        self._free: dict[tuple[int, int], float] = {}
        self._ended: dict[int, StepTime] = {}

    def run(self) -> StepTime | None:
        """The time of the rank that ends last; None where ranks wait for messages that no other
        sends."""
        ranks = [self._rank(number, step) for number, step in enumerate(self._steps)]
        waits = {number: _StageWait(0.0) for number in range(len(ranks))}
        while waits:
            ready = [number for number, wait in waits.items() if wait.ready]
            if not ready:
                return None
            # The earliest first, so that messages are posted in the order of time.
            number = min(ready, key=lambda one: waits[one].until)
            wanted = next(ranks[number], None)
            if wanted is None:
                del waits[number]
            else:
                waits[number] = wanted
        return max(self._ended.values(), key=lambda time: time.total)

    def _rank(self, number: int, step: DryStep) -> Iterator[_StageWait]:
        """Take a rank's step; yields what it waits for before it goes on."""
        now = compute = messaging = 0.0
        left: list[_Message] = []
        for messages, events in itertools.groupby(step.events, key=lambda one: is_message(one[1])):
            if messages:
                yield _StageWait(now)
                batch = [
                    (event, self._post(number, event, now))
                    for _, event in events
                    if isinstance(event, Collective)
                ]
                receives = any(event.kind == "recv" for event, _ in batch)
                wanted = [*left, *(message for _, message in batch)] if receives else left
                left = [] if receives else [message for _, message in batch]
                wait = _StageWait(now, wanted)
                yield wait
                now = wait.until
                messaging += sum(self._seconds(number, event) for event, _ in batch)
                continue
            for phase, event in events:
                if isinstance(event, Operation):
                    seconds = self._times.in_step(phase, event)
                    compute += seconds
                else:
                    seconds = self._seconds(number, event)
                    messaging += seconds
                now += seconds
        wait = _StageWait(now, left)
        yield wait
        now = wait.until
        waiting = min(messaging, now - compute)
        self._ended[number] = StepTime(compute, waiting, now - compute - waiting)

    def _post(self, number: int, event: Collective, now: float) -> _Message:
        """A rank is ready for a message from now on."""
        sends = event.kind == "send"
        way = (number, event.peer) if sends else (event.peer, number)
        place = self._posted[*way, event.kind]
        self._posted[*way, event.kind] += 1
        known = self._messages.setdefault(way, [])
        if place == len(known):
            known.append(_Message())
        message = known[place]
        if sends:
            message.sent = now
        else:
            message.asked = self._asked(way[::-1], now)
        if message.sent is not None and message.asked is not None:
            begin = max(message.sent, message.asked, self._free.get(way, 0.0))
            message.end = self._free[way] = begin + self._seconds(number, event)
        return message

    def _asked(self, way: tuple[int, int], now: float) -> float:
        """When a word that is sent from now on has come."""
        return max([now, *(one.end_before(now) for one in self._messages.get(way, ()))])

    def _seconds(self, number: int, event: Collective) -> float:
        return seconds_of(event, self._links, self._places[number])
