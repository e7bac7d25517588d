"""Which workers a server counts on."""

from __future__ import annotations

import threading
from typing import Any


class Members:
    """The workers of a job, as one server knows them.

    All workers are counted from the beginning, also before they have connected. One that leaves, or is lost, is not counted any
    more; one that comes again counts from the round on that it named.
    """

    def __init__(self, count: int) -> None:
        self.lock = threading.Lock()
        self.live: set[int] = set(range(count))
        self.sessions: dict[int, Any] = {}
        self.begins: dict[int, dict[str, int]] = {}
        self.reasons: dict[int, str] = {}

    def counted(self, key: str, number: int) -> set[int]:
        """The ranks without which round `number` of `key` does not close."""
        with self.lock:
            return {rank for rank in self.live if self.begins.get(rank, {}).get(key, 0) <= number}

    def everyone(self) -> set[int]:
        """The ranks that are counted on."""
        with self.lock:
            return set(self.live)

    def sessions_now(self) -> list[Any]:
        """The workers that are connected, by rank."""
        with self.lock:
            return [self.sessions[rank] for rank in sorted(self.sessions)]

    def connect(self, session: Any) -> tuple[Any, bool]:
        """A worker has come; the session that it replaces, and whether it comes again after others went on without it."""
        with self.lock:
            before = self.sessions.get(session.rank)
            again = session.rank not in self.live
            self.sessions[session.rank] = session
            return before, again

    def count_from(self, rank: int, begins: dict[str, int]) -> None:
        """Count a worker again, from these rounds on."""
        with self.lock:
            self.live.add(rank)
            self.begins[rank] = begins
            self.reasons.pop(rank, None)

    def remove(self, session: Any, reason: str) -> bool:
        """A worker is gone; False when it was not counted, or another session has taken its place."""
        with self.lock:
            known: Any = self.sessions.get(session.rank)
            if known is not session:
                return False
            rank: int = session.rank
            del self.sessions[rank]
            was = rank in self.live
            self.live.discard(rank)
            self.reasons[rank] = reason
            return was
