"""A process ends when its threads sleep."""

from __future__ import annotations

import hashlib
import threading

import pytest

from allhands.world.native_threads import _TASKS, wait_until_asleep
from tests.timeouts import patience

needs_tasks = pytest.mark.skipif(not _TASKS.is_dir(), reason="no /proc/self/task here")


@needs_tasks
def test_a_thread_that_computes_outside_of_the_interpreter_is_waited_for() -> None:
    begun, over = threading.Event(), threading.Event()

    def compute() -> None:
        data = bytes(10**8)
        begun.set()
        hashlib.sha256(data).digest()  # without the interpreter's lock
        over.set()

    thread = threading.Thread(target=compute)
    thread.start()
    begun.wait()
    assert wait_until_asleep(patience(60))
    assert over.is_set()
    thread.join()


@needs_tasks
def test_a_thread_that_computes_for_ever_is_not_waited_for() -> None:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            hashlib.sha256(bytes(10**7)).digest()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        assert not wait_until_asleep(0.2)
    finally:
        stop.set()
        thread.join()


def test_threads_that_sleep_cost_no_wait() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert wait_until_asleep(patience(60))
    stop.set()
    thread.join()
