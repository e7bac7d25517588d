"""Fail when a process that a test has started still runs, and end it.

`make test` sets ALLHANDS_TEST_RUN for pytest, and every process below it inherits it, daemons
included.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import psutil

VARIABLE = "ALLHANDS_TEST_RUN"
GRACE = 5.0  # seconds for processes that were told to end


def left(mark: str) -> list[psutil.Process]:
    """Processes that carry the mark, apart from this one and those above it."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.pid not in own and process.environ().get(VARIABLE) == mark
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # it has ended meanwhile, or belongs to someone else
    return found


def main() -> int:
    """The exit code: 1 when something is left."""
    mark = os.environ[VARIABLE]
    deadline = time.monotonic() + GRACE
    while (processes := left(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            print(f"left running by a test: {process.pid} {' '.join(process.cmdline())[:150]}")
            process.kill()
    return 1 if processes else 0


if __name__ == "__main__":
    sys.exit(main())
