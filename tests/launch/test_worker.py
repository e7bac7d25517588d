"""What code in a worker can ask of the launcher, and what happens where there is none."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from tests.timeouts import patience

# The main thread is blocked, and something that was printed is still in Python's buffer.
BLOCKED = """
import atexit, threading, time
from allhands.launch import worker
atexit.register(print, "exit handlers do not run")
print("printed before")
threading.Timer(0.2, worker.fail, ("the ranks do not agree",)).start()
time.sleep(60)
"""


@pytest.mark.serial
def test_a_worker_can_end_itself_from_another_thread(job: Any) -> None:
    started = time.monotonic()
    code, out, err = job.run("-n", "1", "--no-preload", job.script(BLOCKED))
    assert (code, out) == (1, "[0] printed before\n")
    assert time.monotonic() - started < patience(20)
    assert err.splitlines()[0].endswith(
        "failed first: raised allhands.errors.WorldError: the ranks do not agree"
    )


def test_without_a_launcher_the_reason_is_printed() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "printed before\n",
        "allhands: the ranks do not agree\n",
    )
