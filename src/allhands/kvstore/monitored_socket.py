"""Tracks how long a worker's connection has been silent."""

from __future__ import annotations

import socket
import time


class MonitoredSocket:
    """A connection that tracks for how long its reader has waited.

    While a server works on what came, it reads no sign of life; and while a large frame comes, none
    can come between. Neither is the worker's silence.

    Args:
        link: the connection; one thread reads from it.
    """

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._since: float | None = None
        self._not_before = 0.0

    def recv_into(self, view: memoryview) -> int:
        """As a socket's."""
        self._since = time.monotonic()
        try:
            return self.link.recv_into(view)
        finally:
            self._since = None

    def silent(self, now: float) -> float:
        """For how many seconds the reader has waited and nothing has come."""
        since = self._since
        return 0.0 if since is None else now - max(since, self._not_before)

    def forgive(self, now: float) -> None:
        """Take no silence before `now` for the worker's: this process stood still itself."""
        self._not_before = now
