"""The pipe by which a site's SuperNode tells its superexec that a task can be taken.

Without it, superexec would ask many times a second, and each time a process of Flower's would
answer.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Mapping

#: The variable that holds the number of the descriptor of a process's end.
VARIABLE = "ALLHANDS_SITES_TASKS"


class TaskWriter:
    """The SuperNode's end.

    Args:
        environ: the environment; without `VARIABLE`, nobody is told.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._handle = _handle(environ)
        if self._handle is not None:
            os.set_blocking(self._handle, False)

    def tell(self) -> None:
        """Say that there is a task. Never waits: a full pipe says so already, and a superexec that
        has ended is started again."""
        if self._handle is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._handle, b".")


class TaskReader:
    """Superexec's end.

    Args:
        environ: the environment; without `VARIABLE`, waiting is sleeping.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._handle = _handle(environ)
        self.connected = self._handle is not None

    def wait(self, seconds: float) -> None:
        """Until there is a task, or for so many seconds."""
        if not self.connected:
            time.sleep(seconds)
            return
        assert self._handle is not None
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        if poll.poll(1000 * seconds):
            # Nothing to read: the SuperNode has ended, and nobody will tell any more.
            self.connected = bool(os.read(self._handle, 4096))


def _handle(environ: Mapping[str, str]) -> int | None:
    number = environ.get(VARIABLE)
    return None if number is None else int(number)
