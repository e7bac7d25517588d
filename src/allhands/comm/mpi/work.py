"""What runs a group's operations: one thread a communicator, one that looks after sends and
receives, one that keeps time.

Collectives are blocking MPI calls on a thread of their communicator: two groups may be used in
opposite orders on different ranks, and the pieces of one message start in the same order
everywhere. A future is completed on another thread than these, because what was chained to it may
itself wait for an operation (`allhands.comm.mpi.futures`).
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from allhands.comm.mpi.futures import Callbacks, OrderedFuture
from allhands.comm.mpi.moves import Moves
from allhands.errors import AllhandsError, WorldError

_LOOK_S = 0.25  # how often deadlines are looked at
_JOIN_S = 1.0  # a thread with nothing left to do ends at once


class Work(dist.Work):
    """One operation, as torch hands it out for ``async_op=True``.

    `what` names it for messages, `outputs` are the tensors that it writes, `timeout` is in seconds,
    `peer` is the group rank at the other end of a send or receive (-1: any; None: a collective) and
    `number` counts the collectives of a group from 0.
    """

    def __init__(
        self,
        what: Callable[[], str],
        outputs: list[Any],
        timeout: float,
        callbacks: Callbacks,
        peer: int | None = None,
        number: int = -1,
    ) -> None:
        super().__init__()
        self.what, self.limit, self.peer, self.number = what, timeout, peer, number
        self.deadline = time.monotonic() + timeout
        self.source = -1 if peer is None else peer
        # A receive that nobody waits for does not keep the process from ending.
        self.receives = False
        self._outputs = outputs
        self._done = threading.Event()
        self._error: WorldError | None = None
        self._lock = threading.Lock()
        self._callbacks = callbacks
        self._future: OrderedFuture | None = None

    def finish(self, error: WorldError | None = None) -> bool:
        """Mark it complete, or failed; False when it was already."""
        with self._lock:
            if self._done.is_set():
                return False
            self._error = error
            self._done.set()
            future = self._future
        if future is not None:
            self._callbacks.complete(lambda: self._complete(future))
        return True

    def _complete(self, future: OrderedFuture) -> None:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is complete. `timeout` above 0 bounds this wait alone, which may be
        repeated.

        Raises:
            WorldError: it failed, did not complete within the group's timeout, or not within
                `timeout`.
        """
        seconds = timeout.total_seconds()
        if not self._done.wait(seconds if seconds > 0 else None):
            raise WorldError(
                f"{self.what()} was not complete after the {seconds:g} s of wait(timeout)"
            )
        if self._error is not None:
            raise self._error
        return True

    def settle(self) -> None:
        """Block until it is complete or has failed, which its deadline bounds; raises nothing."""
        self._done.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> WorldError | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[Any]:
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """The group rank that a received message came from."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the list of written tensors; see `allhands.comm.mpi.futures` for its
        callbacks."""
        with self._lock:
            if self._future is None:
                devices = {
                    t.device for t in self._outputs if isinstance(t, torch.Tensor) and t.is_cuda
                }
                self._future = OrderedFuture(self._callbacks, list(devices))
                # An error that Python sets on a future is a value to C++, and DDP would read
                # tensors from it; one that is raised in torch's own `then` is an error.
                self._for_cpp = torch.futures.Future.then(self._future, lambda _: self.result())
                if self._done.is_set():
                    self._complete(self._future)
        return self._future if _called_from_python() else self._for_cpp

    getFuture = get_future


def _called_from_python() -> bool:
    """Whether the caller of the calling method wrote ``get_future``, rather than C++ on behalf of
    whatever Python is running."""
    try:
        return "get_future" in sys._getframe(2).f_code.co_names
    except ValueError:  # a thread of C++ has no frame below
        return False


class Channel:
    """Runs the collectives of one communicator, in the order in which they were called.

    `members` are the MPI ranks of the group; `name` is the same for it on all of them, and for no
    other communicator.
    """

    def __init__(self, moves: Moves, members: Sequence[int], name: str) -> None:
        self.moves, self.members, self.name = moves, tuple(members), name
        self.started = 0  # how many collectives this rank has called
        self.broken: WorldError | None = None
        self._tasks: queue.SimpleQueue[tuple[Work, Callable[[Moves], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def submit(self, work: Work, run: Callable[[Moves], None]) -> None:
        if self.broken is not None:
            raise WorldError(
                f"{work.what()} cannot run, because an earlier operation of this group failed: "
                f"{self.broken}"
            )
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._loop, name=f"allhands-mpi-{self.name}", daemon=True
            )
            self._thread.start()
        self.started += 1
        watchdog.watch(work, self)
        self._tasks.put((work, run))

    def close(self) -> bool:
        """Run what is queued and end the thread; False when it is stuck in an operation that failed
        at its deadline."""
        for work in watchdog.pending_of(self):
            work.settle()
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._tasks.put(None)
        thread.join(_JOIN_S)
        return not thread.is_alive()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            work, run = task
            # What follows a failed operation would be taken by the other ranks for the failed one.
            error = self.broken if self.broken is not None else _error_of(work, run, self.moves)
            if error is not None:
                self.broken = self.broken or error
            work.finish(error)
            watchdog.forget(work)
            del task, work, run  # what they hold must not live until the next operation


def _error_of(work: Work, run: Callable[[Moves], None], moves: Moves) -> WorldError | None:
    try:
        # Outputs may be inference tensors, which can be written in this mode only.
        with torch.inference_mode():
            run(moves)
    except BaseException as error:
        return _failure(work, error)
    return None


def _failure(work: Work, error: BaseException) -> WorldError:
    """An error of MPI, of torch or of ours, with the operation that it happened in."""
    kind = "" if isinstance(error, AllhandsError) else f"{type(error).__name__}: "
    told = WorldError(f"{work.what()} failed: {kind}{error}")
    told.__cause__ = error
    return told


class _Poller:
    """Looks after sends and receives, which are never blocking calls: any number of them may be
    open at once."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[Work, Any, Callable[[Any], None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stop = False

    def stop(self) -> None:
        """End the thread; what is open stays open."""
        self._stop = True
        if self._thread is not None:
            self._new.put((Work(str, [], 0.0, Callbacks()), None, lambda _: None))
            self._thread.join()

    def add(
        self, work: Work, request: Any, finish: Callable[[Any], None], channel: Channel
    ) -> None:
        """Complete `work` when the MPI request has; `finish` gets its status and may raise."""
        watchdog.watch(work, channel)
        self._new.put((work, request, finish))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="allhands-mpi-p2p", daemon=True
                )
                self._thread.start()

    def _loop(self) -> None:
        from mpi4py import MPI

        active: list[tuple[Work, Any, Callable[[Any], None]]] = []
        idle = 0
        while not self._stop:
            if not active:
                active.append(self._new.get())
            with contextlib.suppress(queue.Empty):
                while True:
                    active.append(self._new.get_nowait())
            left = []
            for work, request, finish in active:
                status = MPI.Status()
                try:
                    if request is None or not request.Test(status):
                        left.append((work, request, finish))
                        continue
                    with torch.inference_mode():
                        finish(status)
                    work.finish()
                except BaseException as error:
                    work.finish(_failure(work, error))
                watchdog.forget(work)
            idle = 0 if len(left) < len(active) else idle + 1
            active = left
            # Soon at first, for short answers; seldom later, to leave the core to the training.
            time.sleep(0 if idle < 100 else 2e-5 if idle < 1000 else 1e-3)


poller = _Poller()


class _Watchdog:
    """Fails what is not complete in time, also when nobody but C++ waits for it."""

    def __init__(self) -> None:
        self._pending: dict[Work, Channel] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        # Looked at with the deadlines.
        self.also: Callable[[list[tuple[Work, Channel]]], None] = lambda pending: None

    def watch(self, work: Work, channel: Channel) -> None:
        self._pending[work] = channel
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._loop, name="allhands-mpi-watchdog", daemon=True
                    )
                    self._thread.start()

    def forget(self, work: Work) -> None:
        self._pending.pop(work, None)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def pending_of(self, channel: Channel | None = None) -> list[Work]:
        """What is not complete, of one communicator or of all, except receives."""
        found = list(self._pending.items())
        return [work for work, its in found if channel in (None, its) and not work.receives]

    def fail(self, work: Work, error: WorldError) -> None:
        channel = self._pending.pop(work, None)
        if channel is not None and work.peer is None:
            channel.broken = channel.broken or error
        work.finish(error)

    def _loop(self) -> None:
        while not self._stop.wait(_LOOK_S):
            pending = list(self._pending.items())
            now = time.monotonic()
            for work, _ in pending:
                if now > work.deadline:
                    self.fail(work, _late(work))
            self.also(pending)


def _late(work: Work) -> WorldError:
    return WorldError(
        f"{work.what()} was not complete within the group's timeout of {work.limit:g} s: a rank of "
        "the group did not make the same call, is slow, or is gone. Look at its output, or raise "
        "timeout= where the group is made"
    )


watchdog = _Watchdog()
