"""A process ends when its threads sleep."""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import allhands
from allhands.launch import spawn
from allhands.world import native_threads
from allhands.world.native_threads import (
    _TASKS,
    destroy_group,
    let_threads_end,
    wait_until_asleep,
)
from tests.patience import patience

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


@needs_tasks
def test_threads_go_first_when_a_group_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over, seen = threading.Event(), threading.Event(), []

    def compute() -> None:
        data = bytes(10**8)
        begun.set()
        hashlib.sha256(data).digest()
        over.set()

    monkeypatch.setattr(native_threads, "_BEFORE_GROUP_S", patience(60))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append(over.is_set()))
    thread = threading.Thread(target=compute)
    thread.start()
    begun.wait()
    destroy_group("gloo")
    thread.join()
    assert seen == [True]


def wait_at_exit(path: Path) -> None:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            hashlib.sha256(bytes(10**7)).digest()

    def ends() -> None:  # after that of `allhands.init`, which was registered later
        begun = time.monotonic()
        let_threads_end()
        path.write_text(f"{native_threads.interpreter_ends} {time.monotonic() - begun}")

    atexit.register(ends)
    allhands.init(device="cpu")
    threading.Thread(target=compute, daemon=True).start()


@pytest.mark.serial
def test_a_worker_which_leaves_the_interpreter_up_waits_for_no_thread(tmp_path: Path) -> None:
    spawn(wait_at_exit, (tmp_path / "told",), workers=1)
    ends, seconds = (tmp_path / "told").read_text().split()
    assert ends == "False"
    assert float(seconds) < native_threads.LONGEST_WAIT_S / 2
