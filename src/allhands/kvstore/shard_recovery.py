"""Coming back after a server was started again: with what its mirror has, or to a step of which all
servers have a snapshot."""

from __future__ import annotations

import threading
from typing import Any

from allhands.errors import UserError
from allhands.kvstore.snapshots import Snapshots


class ShardRecovery:
    """How a shard comes back, and the meeting of all workers when it does.

    Every worker asks every server to go back, with the same step and the same name of the occasion.
    The first one's asking does it; all are answered when all have asked. What a worker sent before
    it asked belongs to the time before, and is dropped.

    Args:
        snapshots: where there are some.
        restarted: the server before this one died.
    """

    def __init__(self, snapshots: Snapshots | None, restarted: bool = False) -> None:
        self.snapshots = snapshots
        self.restored = not restarted
        # A server that was started again takes nothing that is not of an occasion, and so serves
        # nothing that was not restored.
        self.occasion = "not restored" if restarted else ""
        self._lock = threading.RLock()
        self._fetching = threading.Lock()
        self._fetched: dict[str, bool] = {}  # by occasion
        self._asked: dict[int, tuple[Any, int]] = {}
        self._trouble: str | None = None
        self._steps = 0

    def steps(self) -> list[int]:
        return [] if self.snapshots is None else self.snapshots.steps()

    def closed(self, shard: Any, chunk: Any) -> None:
        """A round of a chunk was applied. The chunk's lock is held."""
        if (
            self.snapshots is not None
            and chunk.version % self.snapshots.every == 0
            and chunk.number in shard.trained()
        ):
            self.snapshots.collect(shard, chunk)

    def stepped(self, shard: Any) -> None:
        """A worker's step was applied, where nobody waits for anybody."""
        if self.snapshots is None:
            return
        with self._lock:
            self._steps += 1
            number = self._steps
        if number % self.snapshots.every == 0:
            self.snapshots.take_all(shard, number)

    def from_copy(self, shard: Any, occasion: str) -> bool:
        """Whether the shard has all that it ever answered: it lives, or its mirror had a whole
        copy, which is fetched once. All workers are told the same, also those that ask when another
        one has gone back already."""
        with self._fetching:
            if occasion not in self._fetched:
                self._fetched[occasion] = self.restored or (
                    shard.mirror is not None and shard.mirror.fetch()
                )
            return self._fetched[occasion]

    def go_back(self, shard: Any, session: Any, request: int, said: dict[str, Any]) -> None:
        """Go back, once for each occasion; the answer comes when all workers have asked.

        Args:
            said: `step`, None to stay at what there is; `occasion`; `empty`, the server holds
                nothing; and `seen`, the newest version of each chunk and table that the worker
                knows of.
        """
        with self._lock:
            if said["occasion"] != self.occasion:
                self._begin(shard, said["step"], str(said["occasion"]), bool(said["empty"]))
            session.occasion = self.occasion
            if said["step"] is None:
                self._check(shard, said["seen"])
            self._asked[session.rank] = (session, request)
            shard.members.count_all(session.rank)
            self.look_again(shard)

    def _begin(self, shard: Any, step: int | None, occasion: str, empty: bool) -> None:
        self.occasion, self._asked, self._trouble = occasion, {}, None
        shard.drop_open()
        try:
            if step is None:
                for chunk in shard.chunks():
                    # Workers get compressed changes whole next time.
                    chunk.outside += chunk.down is not None
            else:
                if not empty:
                    assert self.snapshots is not None
                    self.snapshots.restore(shard, int(step))
                self._steps = int(step)
            self.restored = True
        except UserError as error:
            self._trouble = str(error)
        if shard.mirror is not None and not shard.mirror.start() and step is not None:
            shard.mirror.refresh()

    def _check(self, shard: Any, seen: dict[str, int]) -> None:
        """A copy may be older than what a worker knows of, if the connection to it was lost before
        the server was."""
        for number, version in seen.items():
            part = shard.parts.get(int(number))
            if part is None or part.version < version:
                self._trouble = (
                    f"the copy of server {shard.number} is older than what workers have got from "
                    "it: it had gone on without one "
                    "when it was lost; train again from the last checkpoint"
                )

    def look_again(self, shard: Any) -> None:
        """Answer if all workers that are counted on have asked."""
        with self._lock:
            if not self._asked or not shard.members.everyone() <= self._asked.keys():
                return
            asked, self._asked = self._asked, {}
            versions = {str(number): part.version for number, part in shard.parts.items()}
            for session, request in asked.values():
                if self._trouble is not None:
                    session.reply(request, error=self._trouble)
                else:
                    session.reply(request, versions=versions)
