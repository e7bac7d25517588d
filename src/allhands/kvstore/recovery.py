"""Going back to a snapshot: after a server was started again, all servers go back to the newest step that all of them have."""

from __future__ import annotations

import threading
from typing import Any

from allhands.errors import UserError
from allhands.kvstore.snapshots import Snapshots


class Recovery:
    """A shard's snapshots, and the meeting of all workers when it goes back to one.

    Every worker asks every server to go back, with the same step and the same name of the occasion. The first one's asking does
    it; all are answered when all have asked. What a worker sent before it asked belongs to the time before, and is dropped.
    """

    def __init__(self, snapshots: Snapshots, restarted: bool = False) -> None:
        self.snapshots = snapshots
        self.restored = not restarted
        # A server that was started again takes nothing that is not of an occasion, and so serves nothing that was not restored.
        self.occasion = "not restored" if restarted else ""
        self._lock = threading.RLock()
        self._asked: dict[int, tuple[Any, int]] = {}
        self._trouble: str | None = None
        self._steps = 0

    def closed(self, shard: Any, chunk: Any) -> None:
        """A round of a chunk was applied. The chunk's lock is held."""
        if chunk.version % self.snapshots.every == 0 and chunk.number in shard.trained():
            self.snapshots.collect(shard, chunk)

    def stepped(self, shard: Any) -> None:
        """A worker's step was applied, where nobody waits for anybody."""
        with self._lock:
            self._steps += 1
            number = self._steps
        if number % self.snapshots.every == 0:
            self.snapshots.take_all(shard, number)

    def go_back(self, shard: Any, session: Any, request: int, step: int, occasion: str, empty: bool) -> None:
        """Go back, once for each occasion; the answer comes when all workers have asked.

        `empty`: the server holds nothing.
        """
        with self._lock:
            if occasion != self.occasion:
                self.occasion, self._asked, self._trouble = occasion, {}, None
                shard.drop_open()
                try:
                    if not empty:
                        self.snapshots.restore(shard, step)
                    self._steps = step
                    self.restored = True
                except UserError as error:
                    self._trouble = str(error)
            session.occasion = occasion
            self._asked[session.rank] = (session, request)
            shard.members.count_all(session.rank)
            self.look_again(shard)

    def look_again(self, shard: Any) -> None:
        """Answer if all workers that are counted on have asked."""
        with self._lock:
            if not self._asked or not shard.members.everyone() <= self._asked.keys():
                return
            asked, self._asked = self._asked, {}
            versions = {str(number): chunk.version for number, chunk in shard.chunks.items()}
            tables = {str(number): table.version for number, table in shard.tables.items()}
            for session, request in asked.values():
                if self._trouble is not None:
                    session.reply(request, error=self._trouble)
                else:
                    session.reply(request, versions=versions, tables=tables)
