"""How the threads of one worker wait for what the servers send."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from allhands.errors import AllhandsError, WorldError

# Seconds after which a wait is reported.
REPORT_AFTER = 3.0


class ServerLostError(AllhandsError):
    """A server is gone, and may come back; never reaches the user."""


class WaitState:
    """What the threads of one worker wait for, and why a wait has failed.

    Attributes:
        changed: guards everything here, and is notified when something that is waited for has come.
        failure: why nothing can go on.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: Exception | None = None
        self.broken: set[int] = set()  # servers that may come back

    def fail(self, error: Exception) -> None:
        """End every wait with this error; the first one counts."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def wait(
        self,
        ready: Callable[[], Any],
        what: Callable[[], str],
        timeout: float | None = None,
        server: int | None = None,
        report: Callable[[], None] | None = None,
    ) -> None:
        """Wait until `ready`, which is asked with the lock held. With `server`, only the loss of
        that one ends it.

        `report` is called once when the wait is long, with the lock held.

        Raises:
            AllhandsError: the failure, or nothing came within `timeout` seconds. A loss is told
                with what was waited for.
        """
        began, told = time.monotonic(), False
        with self.changed:
            while not ready():
                # First: nothing comes back for a worker that was expelled.
                if self.failure is not None:
                    about = f"; {what()}" if isinstance(self.failure, WorldError) else ""
                    raise type(self.failure)(f"{self.failure}{about}") from self.failure
                if self.broken and (server is None or server in self.broken):
                    raise ServerLostError(f"servers {sorted(self.broken)}")
                self.changed.wait(1.0)
                waited = time.monotonic() - began
                if timeout is not None and waited > timeout:
                    raise WorldError(f"{what()}: nothing came within {timeout:.0f} s")
                if waited > REPORT_AFTER and report is not None:
                    report()
                    report = None
                if waited > 20.0 and not told:
                    told = True
                    print(f"allhands: waiting for {waited:.0f} s: {what()}", flush=True)


class PendingReply:
    """Chunks, or an answer, that a thread waits for."""

    __slots__ = ("answer", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.answer: Any = None
