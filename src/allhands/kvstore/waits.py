"""Workers that wait for one another for ever: each reports a long wait to server 0, which finds
those that are in a cycle.

A report says what its worker waits for, and how far that worker has come itself. While it waits it
comes no further, so that a cycle of reports is final, however old each of them is: none of its
workers can have got what the next one has not given.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allhands.comm.log import users_line
from allhands.kvstore.server_link import FIRST
from allhands.kvstore.wire_frames import message

if TYPE_CHECKING:
    from allhands.kvstore.store_links import StoreLinks

# What a worker waits for: round n of a key ("push"), the first value of a key ("init"), or the n-th
# barrier ("barrier").
Need = tuple[str, str, int]


# ---------------------------------------------------------------------- on a worker


def report(store: StoreLinks, needs: Sequence[Need]) -> None:
    """Tell server 0 for what this worker waits, and what it has given. Called by the thread that
    waits."""
    # Another thread of a worker may still push what is missing.
    if not (needs and store._sync and store._threads <= {threading.get_ident()}):
        return
    pushed: dict[str, float] = {
        name: max((store.links[one.server].versions[one.number] for one in own), default=0)
        for name, own in store._pieces.items()
    }
    pushed |= {name: max(number, pushed[name]) for kind, name, number in needs if kind == "push"}
    reached: dict[str, dict[str, float]] = {"push": pushed, "init": {}, "barrier": {}}
    if store.rank == 0:
        reached["init"] = dict.fromkeys(store.shapes, 1)
    if not store._again:
        reached["barrier"][""] = store._barriers
    call, line = _call_and_line()
    store.links[0].put(
        message(
            {
                "op": "waits",
                "call": call,
                "line": line,
                "needs": needs,
                "reached": reached,
                "again": store._again,
            }
        ),
        priority=FIRST,
    )


def missing_rounds(store: StoreLinks, ahead: int) -> list[Need]:
    """The rounds of dense keys whose values have not come; `ahead` of the versions that the worker
    has."""
    found: list[Need] = []
    for name in store.shapes:
        links = [(store.links[one.server], one.number) for one in store._pieces[name]]
        numbers = [
            link.versions[number] + ahead for link, number in links if number in link.targets
        ]
        if numbers:
            found.append(("push", name, max(numbers)))
    return found


def _call_and_line() -> tuple[str, str]:
    """The public call of this package in which this thread is, and the user's line."""
    frame, call = sys._getframe(1), ""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        "allhands.kvstore."
    ):
        call, frame = frame.f_code.co_name, frame.f_back
    return call, users_line(frame)


# ---------------------------------------------------------------------- on server 0


@dataclass
class _Wait:
    call: str
    line: str
    needs: list[Need]
    reached: Mapping[str, Mapping[str, float]]
    absent: float  # how far it has come in what it did not name


class Waits:
    """The newest report of each worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[int, _Wait] = {}

    def add(self, rank: int, said: Mapping[str, Any]) -> str | None:
        """Take a worker's report; the error where it will wait for ever."""
        # One that came again is not counted in what it has not joined.
        absent = math.inf if said["again"] else 0
        needs = [(str(kind), str(key), int(number)) for kind, key, number in said["needs"]]
        with self._lock:
            self._waits[rank] = _Wait(
                str(said["call"]), str(said["line"]), needs, said["reached"], absent
            )
            cycle = self._cycle(rank)
            lowest = cycle.index(min(cycle)) if cycle else 0
            cycle = cycle[lowest:] + cycle[:lowest]
            return _text([(one, self._waits[one], need) for one, need in cycle]) if cycle else None

    def remove(self, rank: int) -> None:
        """A worker is gone."""
        with self._lock:
            self._waits.pop(rank, None)

    def clear(self) -> None:
        """Forget all reports."""
        with self._lock:
            self._waits.clear()

    def _cycle(self, first: int) -> list[tuple[int, Need]]:
        """The shortest cycle through a worker: each rank, and what it needs of the next one."""
        paths: dict[int, list[tuple[int, Need]]] = {first: []}
        for rank in (ranks := [first]):
            for other in sorted(self._waits):
                if other != rank and (other == first or other not in paths):
                    need = self._lacks(rank, other)
                else:
                    need = None
                if need is None:
                    continue
                path = [*paths[rank], (rank, need)]
                if other == first:
                    return path
                paths[other] = path
                ranks.append(other)
        return []

    def _lacks(self, rank: int, other: int) -> Need | None:
        """What a worker waits for that another one has not given."""
        theirs = self._waits[other]
        for kind, key, number in self._waits[rank].needs:
            asked = other == 0 or kind != "init"  # first values are worker 0's
            if asked and theirs.reached.get(kind, {}).get(key, theirs.absent) < number:
                return kind, key, number
        return None


def _text(cycle: Sequence[tuple[int, _Wait, Need]]) -> str:
    parts = []
    for (rank, wait, (kind, key, _)), (other, *_) in zip(
        cycle, [*cycle[1:], cycle[0]], strict=True
    ):
        what = {
            "push": f"pushes '{key}'",
            "init": f"makes '{key}'",
            "barrier": f"calls {wait.call} too",
        }[kind]
        parts.append(
            f"worker {rank} is in {wait.call} ({wait.line}) and waits until worker {other} {what}"
        )
    advice = "make the same calls in the same order on all workers"
    if all(kind == "push" for _, _, (kind, _, _) in cycle):
        keys = sorted({key for _, _, (_, key, _) in cycle})
        advice = (
            "exchange keys in the same order on all workers, or push all of them before the first "
            f"is pulled: push({keys}, …), then pull({keys}, …)"
        )
    return f"the workers wait for one another for ever: {'; '.join(parts)}; {advice}"
