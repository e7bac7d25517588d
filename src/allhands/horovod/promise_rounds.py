"""Rounds: sets of allreduces that come again in every step, agreed as a whole before their
tensors are there.

A rank promises a round: it will give all its parts, and nothing can keep it from it but a fault.
When all ranks of the process set have promised the same parts, they are told to go, and each runs
them in the order of the parts on its own, in a torch group that serves nothing else (`lanes.Lane`).
What is not the same on all ranks is declined, and the ranks ask for each part by its name, as they
do for everything else. No sockets, no threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from allhands.horovod.operation_request import Key, OperationRequest, ranks_text

Parts = tuple[tuple[Key, OperationRequest], ...]
# A rank that waits so long for the others' promises asks by name, so that whoever does something
# else is told of it by name. As long after all have promised, they are asked whether they have kept
# it, and again and again.
LATE_S = 5.0


@dataclass
class _PromiseRound:
    since: float
    parts: Parts
    keys: frozenset[Key]
    promised: dict[int, None] = field(default_factory=dict)
    # Of those who were told to go: from whom nothing has been heard since.
    unkept: set[int] = field(default_factory=set)
    asked: float | None = None
    warned: bool = False

    def what(self) -> str:
        kind, name = self.parts[0][0][1:]
        more = len(self.parts) - 1
        return f"{kind} {name!r}" + (f" and {more} more of its round" if more else "")


class PromiseRounds:
    """Of one world, on rank 0's side.

    Args:
        tell: takes ranks and what they are to be told.
        size: how many ranks there are.
        clock: seconds.
    """

    def __init__(
        self,
        tell: Callable[[Iterable[int], dict[str, Any]], None],
        size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell, self._size, self._clock = tell, size, clock
        self._open: dict[int, _PromiseRound] = {}
        self._running: dict[int, _PromiseRound] = {}
        self._lanes: set[int] = set()  # the process sets that have one

    def promise(
        self,
        rank: int,
        set_id: int,
        parts: Parts,
        members: tuple[int, ...],
        possible: Callable[[Parts], bool],
    ) -> None:
        """Rank `rank` promises these parts; `possible` says whether nothing else stands against
        them."""
        running = self._running.get(set_id)
        if running is not None:
            running.unkept.discard(rank)
        found = self._open.get(set_id)
        if not possible(parts) or (
            found is not None and found.parts is not parts and found.parts != parts
        ):
            self.decline(set_id)
            return self._tell([rank], {"decline": set_id})
        if found is None:
            found = self._open[set_id] = _PromiseRound(
                self._clock(), parts, frozenset(key for key, _ in parts)
            )
        found.promised[rank] = None
        if len(found.promised) == len(members):
            del self._open[set_id]
            found.since, found.unkept = self._clock(), set(members)
            self._running[set_id] = found
            if set_id not in self._lanes:
                self._lanes.add(set_id)
                self._tell(range(self._size), {"lane": set_id, "ranks": members})
            self._tell(members, {"go": set_id})
        return None

    def has_lane(self, set_id: int) -> bool:
        """Whether a round can be run without the ranks outside of the process set."""
        return set_id in self._lanes

    def asked(self, rank: int, key: Key) -> None:
        """Rank `rank` asks for this by its name; who has promised it has to do so as well."""
        found = self._open.get(key[0])
        if found is not None and key in found.keys and rank not in found.promised:
            self.decline(key[0])

    def decline(self, set_id: int) -> None:
        """What is promised in this process set and not agreed is to be asked for by name."""
        found = self._open.pop(set_id, None)
        if found is not None:
            self._tell(list(found.promised), {"decline": set_id})

    def decline_all(self) -> None:
        """The same in every process set."""
        for set_id in list(self._open):
            self.decline(set_id)

    def kept(self, rank: int, set_id: int) -> None:
        """Rank `rank` has given all parts of the last round of this process set."""
        running = self._running.get(set_id)
        if running is not None:
            running.unkept.discard(rank)

    def broken_by(self, rank: int) -> str:
        """What it says when rank `rank` is gone and may not have kept its promise; "" when it
        has."""
        for running in self._running.values():
            if rank in running.unkept:
                return running.what()
        return ""

    def drop(self, set_id: int) -> None:
        """The process set is removed."""
        self.decline(set_id)
        self._running.pop(set_id, None)
        self._lanes.discard(set_id)

    def clear(self) -> None:
        """Nothing works any more."""
        self._open.clear()
        self._running.clear()

    def look(self, warn_after: float, stop_after: float) -> tuple[list[str], str]:
        """To be called now and then. Returns lines for the user, and why all has to end, or ""."""
        now = self._clock()
        for set_id, found in list(self._open.items()):
            if now - found.since >= LATE_S:
                self.decline(set_id)
        lines, late = [], ""
        for set_id, running in self._running.items():
            if not running.unkept:
                continue
            age = now - running.since
            if running.asked is None and age < min(
                LATE_S, warn_after or LATE_S, stop_after or LATE_S
            ):
                continue
            if running.asked is None or now - running.asked >= LATE_S:
                running.asked = now
                self._tell(sorted(running.unkept), {"kept?": set_id})
                continue  # their answers come before the next look
            text = (
                f"{running.what()}: all ranks began it {age:.0f} s ago, "
                f"{ranks_text(running.unkept)} did not end it"
            )
            if 0 < warn_after <= age and not running.warned:
                running.warned = True
                lines.append(text)
            if 0 < stop_after <= age:
                late = late or text
        return lines, late
