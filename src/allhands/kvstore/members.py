"""Which workers a server counts on, and who of them is in the open round of a key."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from allhands.kvstore.parts import KeyPart


class Members:
    """The workers of a job, as one server knows them.

    All workers are counted from the beginning, also before they have connected. One that leaves, or
    is lost, is not counted any more; one that comes again counts from the rounds on that it named,
    and only for the keys that it named.

    Attributes:
        live: the ranks that are counted.
        begins: of those that came again: the first round that counts on them, by key.
        final: those that have left and will not come again.
    """

    def __init__(self, count: int) -> None:
        self.lock = threading.Lock()
        self.live: set[int] = set(range(count))
        self.sessions: dict[int, Any] = {}
        self.begins: dict[int, dict[str, int]] = {}
        self.final: set[int] = set()

    def counted(self, key: str, number: int) -> set[int]:
        """The ranks without which round `number` of `key` does not close."""
        with self.lock:
            return {
                rank
                for rank in self.live
                if rank not in self.begins or self.begins[rank].get(key, number + 1) <= number
            }

    def everyone(self) -> set[int]:
        """The ranks that are counted on."""
        with self.lock:
            return set(self.live)

    def sessions_now(self) -> list[Any]:
        """The workers that are connected, by rank."""
        with self.lock:
            return [self.sessions[rank] for rank in sorted(self.sessions)]

    def holds(self, session: Any) -> bool:
        """Whether this is the session of a worker that is there."""
        with self.lock:
            return self.sessions.get(session.rank) is session

    def connect(self, session: Any) -> tuple[Any, bool]:
        """A worker has come; the session that it replaces, and whether it comes again after others
        went on without it."""
        with self.lock:
            before = self.sessions.get(session.rank)
            again = session.rank not in self.live
            self.sessions[session.rank] = session
            self.final.discard(session.rank)
            return before, again

    def count_from(self, rank: int, begins: dict[str, int]) -> None:
        """Count a worker again, from these rounds on."""
        with self.lock:
            self.live.add(rank)
            self.begins.setdefault(rank, {}).update(begins)

    def count_all(self, rank: int) -> None:
        """Count a worker in all rounds from now on: it has the same values as the others."""
        with self.lock:
            self.live.add(rank)
            self.begins.pop(rank, None)

    def restore(self, live: Collection[int]) -> None:
        """Count on those whom a server counted on that died."""
        with self.lock:
            self.live = set(live)

    def remove_absent(self, rank: int) -> bool:
        """A worker has never come; False when it is not counted, or here."""
        with self.lock:
            if rank in self.sessions or rank not in self.live:
                return False
            self.live.discard(rank)
            self.begins[rank] = {}
            return True

    def remove(self, session: Any) -> bool:
        """A worker is gone; False when it was not counted, or another session has taken its
        place."""
        with self.lock:
            known: Any = self.sessions.get(session.rank)
            if known is not session:
                return False
            rank: int = session.rank
            del self.sessions[rank]
            was = rank in self.live
            self.live.discard(rank)
            self.begins[rank] = {}  # should it come again, it has to name its rounds
            return was


@dataclass
class _KeyRound:
    number: int
    left: dict[int, int] = field(default_factory=dict)  # by rank: chunks that have not come
    whole: set[int] = field(default_factory=set)  # the ranks of which all chunks have come
    members: frozenset[int] | None = None  # who is in it; settled once


class KeyRounds:
    """The open rounds of a server's keys.

    A worker that is lost between two chunks of a key must count in all of them or in none. So its
    part is added up once all of its chunks are here, and who is in a round is settled once for the
    whole key. Where a loss ends the job there is nothing to mend, and each chunk goes its own way,
    sooner.

    Its lock is taken after a chunk's, and before that of the members.

    Args:
        chunks: the server's, by number; more may come.
        members: the workers.
        by_key: the others go on without a lost worker.
    """

    def __init__(self, chunks: Mapping[int, KeyPart], members: Members, by_key: bool) -> None:
        self._chunks, self._members, self._by_key = chunks, members, by_key
        self._lock = threading.Lock()
        self._open: dict[str | int, _KeyRound] = {}
        self._parts: dict[str, list[KeyPart]] = {}

    def parts(self, chunk: KeyPart) -> list[KeyPart]:
        """The chunks whose rounds have the same members as this one's."""
        if not self._by_key:
            return [chunk]
        # A key gets all of its chunks at once, before it is pushed.
        if chunk.key not in self._parts:
            self._parts[chunk.key] = [
                one for one in list(self._chunks.values()) if one.key == chunk.key
            ]
        return self._parts[chunk.key]

    def _unit(self, chunk: KeyPart) -> str | int:
        return chunk.key if self._by_key else chunk.number

    def arrive(self, chunk: KeyPart, number: int, worker: Any, early: bool = False) -> bool | None:
        """A push of round `number` has come. True: it completes the worker's part. None: the worker
        is not counted any more, and what it pushes is to be dropped, unless it came `early`, when
        the worker was. The chunk's lock is held."""
        parts = len(self.parts(chunk))
        with self._lock:
            if self._by_key and not early and not self._members.holds(worker):
                return None
            current = self._open.get(self._unit(chunk))
            if current is None or current.number != number:
                current = self._open[self._unit(chunk)] = _KeyRound(number)
            current.left[worker.rank] = current.left.get(worker.rank, parts) - 1
            if current.left[worker.rank]:
                return False
            current.whole.add(worker.rank)
            self._settle(chunk.key, current)
            return True

    def state(self, chunk: KeyPart) -> tuple[Collection[int], Collection[int], bool]:
        """Of the chunk's open round: the ranks that are waited for, those whose part is here, and
        whether nobody else comes into it. The chunk's lock is held."""
        with self._lock:
            current = self._open.get(self._unit(chunk))
            if current is None or current.number != chunk.version + 1:
                return (), (), False
            if current.members is not None:
                return current.members, current.members, True
            return self._members.counted(chunk.key, current.number), set(current.whole), False

    def look_again(self, lost: int | None = None) -> None:
        """Other workers are counted than before; of a lost one only what is whole remains."""
        with self._lock:
            for unit, current in self._open.items():
                if current.members is None:
                    if lost is not None and lost not in current.whole:
                        current.left.pop(lost, None)
                    self._settle(unit if isinstance(unit, str) else self._chunks[unit].key, current)

    def _settle(self, key: str, current: _KeyRound) -> None:
        if (
            current.members is None
            and current.whole
            and self._members.counted(key, current.number) <= current.whole
        ):
            current.members = frozenset(current.whole)

    def clear(self) -> None:
        """Forget all open rounds."""
        with self._lock:
            self._open.clear()
            self._parts.clear()
