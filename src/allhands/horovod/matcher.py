"""Which operations all their ranks have asked for, and in which order they run. No sockets, no
threads: see `coordinator`.

An operation is known by its process set, its kind and its name. It is agreed when every rank of the
set has asked for it, or has joined; then all ranks are told, in one order. What cannot be one
operation, or can never be complete, fails on every rank that asks for it with a text that says who
gave or did what.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from allhands.horovod.operation_request import Key, OperationRequest, disagreement, ranks_text
from allhands.horovod.promise_rounds import Parts, PromiseRounds

GLOBAL_SET = 0
# Two ranks that wait for each other under one name, one in an allgather and one in an allreduce, or
# in different process sets, may yet come to the other's call. So long they are given.
CROSSED_S = 5.0


@dataclass
class _Pending:
    since: float
    asks: dict[int, OperationRequest] = field(default_factory=dict)
    warned: bool = False


class Matcher:
    """The state of rank 0's side.

    Args:
        size: how many ranks there are.
        fusion_threshold: bytes up to which agreed allreduces travel as one.
        warn_after: seconds after which a call that some rank has not made is reported; 0 never
            reports.
        stop_after: seconds after which it is an error; 0 waits for ever.
        clock: seconds.
    """

    def __init__(
        self,
        size: int,
        fusion_threshold: int,
        warn_after: float,
        stop_after: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self.sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(size))}
        self._threshold = fusion_threshold
        self._warn_after, self._stop_after, self._clock = warn_after, stop_after, clock
        self._pending: dict[Key, _Pending] = {}
        # And the ranks that have yet to hear it.
        self._refused: dict[Key, tuple[str, set[int]]] = {}
        self._joined: dict[int, None] = {}  # in the order in which they came
        self._gone: dict[int, str] = {}
        self._broken = ""
        self._out: list[tuple[Iterable[int], dict[str, Any]]] = []
        self._ready: list[tuple[Key, dict[int, OperationRequest]]] = []
        self._rounds = PromiseRounds(self._tell, size, clock)

    # ------------------------------------------------------------------ what ranks say

    def ask(self, rank: int, key: Key, ask: OperationRequest) -> None:
        """Rank `rank` has its part of an operation ready."""
        if self._broken:
            return self._tell([rank], {"broken": self._broken})
        members = self.sets.get(key[0])
        if members is None or rank not in members:
            return self._tell(
                [rank],
                {
                    "fail": [key],
                    "error": f"{key[1]} {key[2]!r}: the process set {key[0]} does not exist",
                },
            )
        if key in self._refused:
            text, waiting = self._refused[key]
            if rank in waiting:
                waiting.discard(rank)
                if not waiting:
                    del self._refused[key]
                return self._tell([rank], {"fail": [key], "error": text})
        self._rounds.asked(rank, key)
        pending = self._pending.setdefault(key, _Pending(self._clock()))
        pending.asks[rank] = ask
        return self._look_at(key)

    def promise(self, rank: int, set_id: int, parts: Parts) -> None:
        """Rank `rank` promises a round (see `promise_rounds`)."""
        if self._broken:
            return self._tell([rank], {"broken": self._broken})
        members = self.sets.get(set_id)
        if members is None or rank not in members:
            return self._tell([rank], {"decline": set_id})
        return self._rounds.promise(rank, set_id, parts, members, self._is_possible)

    def kept(self, rank: int, set_id: int) -> None:
        """Rank `rank` has given all parts of this process set's last round."""
        self._rounds.kept(rank, set_id)

    def join(self, rank: int) -> None:
        """Rank `rank` has no more data and gives zeros until all others have joined as well."""
        if self._broken:
            return self._tell([rank], {"broken": self._broken})
        self._rounds.decline_all()
        self._joined[rank] = None
        for key in list(self._pending):
            self._look_at(key)
        return self._look_at_joined()

    def leave(self, rank: int, why: str) -> None:
        """Rank `rank` is gone; `why` ends the sentence "rank 1 ..."."""
        self._gone.setdefault(rank, why)
        self._rounds.decline_all()
        broken = self._rounds.broken_by(rank)
        if broken:
            return self.stop(f"{broken}: rank {rank}, which has begun it, {why}")
        for key in list(self._pending):
            self._look_at(key)
        return self._look_at_joined()

    # ------------------------------------------------------------------ what ranks are told

    def take(self) -> list[tuple[Iterable[int], dict[str, Any]]]:
        """What has to be told since the last time, each message with the ranks that it is for, in
        this order."""
        self._fuse()
        out, self._out = self._out, []
        return out

    def look(self) -> str:
        """To be called now and then: ends what waits too long. Returns lines for the user, or
        ""."""
        now = self._clock()
        lines, late = [], ""
        for key, pending in list(self._pending.items()):
            age = now - pending.since
            missing = self._missing(key, pending)
            if age >= CROSSED_S and (text := self._crossed(key, pending, missing, now)):
                self._refuse(key, text)
                continue
            if 0 < self._warn_after <= age and not pending.warned:
                pending.warned = True
                lines.append(self._stalled(key, pending, missing, age))
            if 0 < self._stop_after <= age:
                late = late or self._stalled(key, pending, missing, age)
        more, stuck = self._rounds.look(self._warn_after, self._stop_after)
        lines += more
        late = late or stuck
        if late:
            self.stop(f"{late}; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is over")
        return "\n".join(lines)

    def fail(self, text: str) -> None:
        """An operation failed on a rank in the middle, after which none can rely on any other."""
        gone = [f"rank {rank} {why}" for rank, why in self._gone.items()]
        self.stop(f"{text} ({'; '.join(gone)})" if gone else text)

    def stop(self, text: str) -> None:
        """Nothing works any more; every rank is told why."""
        self._broken = self._broken or text
        self._pending.clear()
        self._rounds.clear()
        self._tell(range(self.size), {"broken": self._broken})

    # ------------------------------------------------------------------ inside

    def _tell(self, ranks: Iterable[int], message: dict[str, Any]) -> None:
        self._fuse()  # what was agreed before comes before
        self._out.append((ranks, message))

    def _is_possible(self, parts: Parts) -> bool:
        """Whether all ranks of a round can run it by themselves, and none has asked for a part of
        it by its name."""
        if self._joined or (self._gone and not self._rounds.has_lane(parts[0][0][0])):
            return False
        if any(rank in self._gone for rank in self.sets[parts[0][0][0]]):
            return False
        return not any(key in self._pending or key in self._refused for key, _ in parts)

    def _missing(self, key: Key, pending: _Pending) -> list[int]:
        return [
            rank
            for rank in self.sets[key[0]]
            if rank not in pending.asks and rank not in self._joined
        ]

    def _look_at(self, key: Key) -> None:
        pending = self._pending.get(key)
        if pending is None:
            return None
        missing = self._missing(key, pending)
        for rank in missing:
            if rank in self._gone:
                return self._refuse(key, f"{key[1]} {key[2]!r}: rank {rank} {self._gone[rank]}")
        if missing:
            return None
        members = self.sets[key[0]]
        text = disagreement(key[2], dict(sorted(pending.asks.items())), self._joined, members)
        if text is not None:
            return self._refuse(key, text)
        del self._pending[key]
        self._ready.append((key, pending.asks))
        return None

    def _refuse(self, key: Key, text: str) -> None:
        pending = self._pending.pop(key)
        waiting = {
            rank
            for rank in self.sets[key[0]]
            if rank not in pending.asks and rank not in self._gone
        }
        if waiting:
            self._refused[key] = (text, waiting)
        self._tell(sorted(pending.asks), {"fail": [key], "error": text})

    def _look_at_joined(self) -> None:
        if not self._joined:
            return None
        if len(self._joined) == self.size:
            last = list(self._joined)[-1]
            self._joined.clear()
            self._refused.clear()
            return self._tell(range(self.size), {"joined": last})
        gone = [rank for rank in self._gone if rank not in self._joined]
        if gone:
            self.stop(f"join: rank {gone[0]} {self._gone[gone[0]]}")
        return None

    def _crossed(self, key: Key, pending: _Pending, missing: list[int], now: float) -> str:
        """Two ranks under the same name in two operations that wait for one another."""
        for other, waiting in self._pending.items():
            if other == key or other[2] != key[2] or now - waiting.since < CROSSED_S:
                continue
            there = [rank for rank in missing if rank in waiting.asks]
            here = [rank for rank in self._missing(other, waiting) if rank in pending.asks]
            if there and here:
                text = (
                    f"{key[2]!r}: {ranks_text(here)} called {self._call(key)}, {ranks_text(there)} "
                    f"called {self._call(other)}; all ranks must call the same"
                )
                self._refuse(other, text)
                return text
        return ""

    def _call(self, key: Key) -> str:
        if key[0] == GLOBAL_SET:
            return key[1]
        return f"{key[1]} in the process set of {ranks_text(self.sets[key[0]])}"

    def _stalled(self, key: Key, pending: _Pending, missing: list[int], age: float) -> str:
        waits = []
        for rank in missing:
            others = [
                other
                for other, entry in self._pending.items()
                if rank in entry.asks and other != key
            ]
            waits += (
                [f"rank {rank} waits in {self._call(others[0])} {others[0][2]!r}"] if others else []
            )
        more = f" ({', '.join(waits)})" if waits else ""
        return (
            f"{self._call(key)} {key[2]!r}: {ranks_text(pending.asks)} called it {age:.0f} s ago, "
            f"{ranks_text(missing)} did not{more}"
        )

    def _fuse(self) -> None:
        """Put what is ready into messages; neighbouring allreduces of one sort become one."""
        ready, self._ready = self._ready, []
        batch: list[tuple[Key, dict[int, OperationRequest]]] = []
        sort: Any = None
        held = 0
        for key, asks in ready:
            ask = next(iter(asks.values()))
            size = ask.size
            # A group was put together by its caller.
            fits = key[1] == "allreduce" and len(ask.shapes) == 1
            own = (key[0], ask.op, ask.pre, ask.post, ask.device, ask.dtypes) if fits else None
            if batch and (own is None or own != sort or held + size > self._threshold):
                self._send(batch)
                batch, held = [], 0
            batch.append((key, asks))
            sort, held = own, held + size
        if batch:
            self._send(batch)

    def _send(self, batch: list[tuple[Key, dict[int, OperationRequest]]]) -> None:
        members = self.sets[batch[0][0][0]]
        away = [rank for rank in members if rank in self._joined]
        entries = []
        for key, asks in batch:
            entry: dict[str, Any] = {"key": key}
            ordered = [asks[rank] for rank in members if rank in asks]
            absent = set(ordered[0].absent).intersection(*(ask.absent for ask in ordered[1:]))
            if absent:
                entry["absent"] = sorted(absent)
            if away:
                entry["ask"] = ordered[0].message()
            if key[1] == "allgather":
                entry["rows"] = [
                    [ask.shapes[place][0] for ask in ordered]
                    for place in range(len(ordered[0].shapes))
                ]
            if key[1] == "alltoall":
                entry["splits"] = [ask.splits for ask in ordered]
            if key[1] == "add_set":
                entry["set"] = self._add(ordered[0].splits)
            if key[1] == "remove_set":
                self.sets.pop(ordered[0].root, None)
                self._rounds.drop(ordered[0].root)
            entries.append(entry)
        self._out.append((members, {"run": entries, "active": len(members) - len(away)}))

    def _add(self, ranks: tuple[int, ...]) -> int:
        number = max(self.sets) + 1
        self.sets[number] = ranks
        return number
