"""Futures whose callbacks run in the order in which they were attached, on threads of their own.

torch runs a callback where its future is completed, or at once in the caller when it is complete
already, so that callbacks which call collectives themselves (PowerSGD's do) call them in another
order on each rank. Here they run one after another, in the order of `then`, which is that of the
program and so the same on all ranks; and what they call goes to a communicator of its own, so that
it cannot fall between the calls of the program (`depth`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

_within = threading.local()


def depth() -> int:
    """0 in the program, 1 in a callback, 2 in a callback that was attached in one, …"""
    return getattr(_within, "depth", 0)


class Callbacks:
    """Runs what the futures of one group have to do: a thread for each depth, since a callback may
    wait for another future."""

    def __init__(self) -> None:
        self._tasks: dict[int, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._lock = threading.Lock()

    def run(self, task: Callable[[], None]) -> None:
        """Run `task` after all that was given at this depth before."""
        self._put(depth(), task)

    def complete(self, task: Callable[[], None]) -> None:
        """Run `task`, which completes a future and waits for nothing."""
        self._put(-1, task)

    def close(self) -> None:
        """End the threads, once they have done what they were given."""
        with self._lock:
            for tasks in self._tasks.values():
                tasks.put(None)
            self._tasks = {}

    def _put(self, level: int, task: Callable[[], None]) -> None:
        with self._lock:
            if level not in self._tasks:
                self._tasks[level] = queue.SimpleQueue()
                arguments = (self._tasks[level], level)
                threading.Thread(
                    target=self._loop,
                    args=arguments,
                    name=f"allhands-mpi-then-{level}",
                    daemon=True,
                ).start()
            self._tasks[level].put(task)

    @staticmethod
    def _loop(tasks: queue.SimpleQueue[Callable[[], None] | None], level: int) -> None:
        _within.depth = level + 1
        while (task := tasks.get()) is not None:
            task()
            del task  # what it holds must not live until the next one


class OrderedFuture(torch.futures.Future[Any]):
    """A future of one group. A failed one raises its error in `wait` and in the futures that follow
    from it."""

    def __init__(self, callbacks: Callbacks, devices: list[torch.device]) -> None:
        super().__init__(devices=list(devices))
        self._callbacks, self._on = callbacks, devices

    def then(self, callback: Callable[[Any], Any]) -> OrderedFuture:
        child = OrderedFuture(self._callbacks, self._on)

        def run() -> None:
            with contextlib.suppress(Exception):  # the callback is to see it
                self.wait()
            try:
                child.set_result(callback(self))
            except Exception as error:
                child.set_exception(error)

        self._callbacks.run(run)
        return child
