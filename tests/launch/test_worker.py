"""What code in a worker can ask of the launcher, and what happens where there is none."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from tests.patience import patience

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


# PyTorch's pool of threads is renewed by the first call in a fork. This process has used its own.
FORKS = """
import os, threading
import torch
from allhands.launch import worker

def work():
    together.wait()
    try:
        torch.ones(200_000).add_(1)
    except RuntimeError as error:
        errors.append(error)

torch.set_num_threads(4)
torch.ones(200_000).add_(1)
failed = 0
for _ in range(20):
    agent = os.getpid()
    if os.fork() == 0:
        streams = [os.open(os.devnull, os.O_WRONLY) for _ in range(3)]
        worker.enter({"rank": 0, "env": {}}, agent, streams, [])
        together, errors = threading.Barrier(8), []
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(len(errors))
    failed += os.wait()[1] != 0
print(failed)
"""


def test_threads_of_a_fork_may_compute_at_the_same_time() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True)
    assert done.stdout == "0\n", done.stderr


# One thread waits for ever, and another one still has something to do.
STUCK = """
import threading, time
import torch
from allhands.launch import worker

def work():
    time.sleep(0.5)
    print("the other thread has ended")

stuck = threading.Thread(target=threading.Event().wait)
worker.stuck_threads.add(stuck)
for thread in (stuck, threading.Thread(target=work)):
    thread.start()
"""


def test_the_end_waits_for_no_thread_that_waits_for_a_lost_rank(job: Any) -> None:
    code, out, err = job.run("-n", "1", job.script(STUCK), timeout=60)
    assert (code, out) == (0, "[0] the other thread has ended\n"), err
