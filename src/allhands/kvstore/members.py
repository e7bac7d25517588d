"""Which workers a server counts on."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any


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
