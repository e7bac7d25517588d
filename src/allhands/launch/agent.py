"""The process that starts the workers of one host and never leaves one behind.

The launcher starts one agent a host and talks to it over the agent's standard streams (see
`protocol`). The agent imports torch once and forks every worker from itself, which takes
milliseconds instead of seconds a worker. For the fork to be safe it is single-threaded, makes no
tensors and never touches a GPU. It passes output on, watches heartbeats, reports exits, and when
the launcher is gone, however it went, stops the workers and everything they started.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from typing import Any

from allhands.errors import UserError
from allhands.launch import processes, worker
from allhands.launch.child import Child
from allhands.launch.lines import LineCutter
from allhands.launch.protocol import CHUNK, write_all
from allhands.launch.python import as_python
from allhands.launch.reach import reach
from allhands.launch.setup import set_up
from allhands.launch.store_host import StoreHost
from allhands.wire import LineReader, encode
from allhands.world.interface import own_addresses, reachable_addresses
from allhands.world.membership import host_id

TICK = 1.0
# Seconds between SIGTERM and SIGKILL when the launcher is gone, and for what a worker left behind.
LAST_GRACE = 2.0
# A loop that comes round this late was itself suspended, and so probably were the workers.
LATE = 3.0
# A scheduler may send a signal to every process of a job: to the launcher, who passes it on, to
# this process, and to the workers. What reaches this process too within so many seconds has reached
# the workers already.
HEARD_TOO = 0.25


class Agent:
    """The loop of one agent. `requests` and `events` are the descriptors from and to the
    launcher."""

    def __init__(self, requests: int, events: int) -> None:
        self.requests, self.events = requests, events
        self.inbox = LineReader()
        self.selector = selectors.PollSelector()  # holds no descriptor that forks would share
        self.wake, wake_end = os.pipe()
        self.own_fds = {requests, events, self.wake, wake_end}
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        self.selector.register(requests, selectors.EVENT_READ)
        self.selector.register(self.wake, selectors.EVENT_READ)
        self.children: dict[int, Child] = {}
        self.store: StoreHost | None = None
        self.parent = 0
        # seconds without a word from a launcher elsewhere that mean it is lost; 0: it is here
        self.launcher_timeout = 0.0
        self.heard_launcher = time.monotonic()
        # Seconds without a round after which this process ends; 0 waits for the launcher.
        self.idle_timeout = 0.0
        self.idle_since = time.monotonic()
        self.beat_timeout = 0.0
        self.running = False  # a round was started and is not idle yet
        # The round goes on without processes, because the launcher may start some again.
        self.hold = False
        self.ending = False
        self.end_by = float("inf")
        self.sweep_until = 0.0  # when to give up on processes that do not end even after SIGKILL
        self.last_tick = time.monotonic()
        self.heard: dict[int, float] = {}  # signal -> when this process itself got it last
        self.untold: list[int] = []  # of those, the ones that are still to be looked at
        # for a call that may come or not; what happens meanwhile is no affair of that call
        self.waits = False
        # Signals for the workers, and when the launcher said so.
        self.to_pass: list[tuple[int, float]] = []
        self.task: dict[str, Any] | None = None
        # Folders to remove in the end; in shared memory they would cost memory for ever.
        self.scratch: list[str] = []

    def send(self, **event: Any) -> None:
        """Tell the launcher; when it is gone there is nobody to tell."""
        try:
            write_all(self.events, encode(event))
        except OSError:
            self.end()

    def end(self, grace: float = LAST_GRACE) -> None:
        """Stop everything and leave the loop once nothing is left."""
        if not self.ending:
            self.ending = True
            self.end_by = time.monotonic() + grace + 10
            self.stop(None, grace)

    def serve(self) -> dict[str, Any] | None:
        """Run until the launcher is done or gone. In a forked worker it returns that worker's
        task."""
        while not (self.ending and (not self.running or time.monotonic() > self.end_by)):
            ready = self.selector.select(0.05 if self.to_pass or self._is_stopping() else TICK)
            # First of all who has ended: the time of an exit is the time at which it is seen here.
            self._reap()
            for key, _ in ready:
                if key.fd == self.requests:
                    self._read_requests()
                elif key.fd == self.wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake, 4096)
                elif key.data is not None:
                    self._read_child(key.data, key.fd)
                if self.task is not None:
                    return self.task
            self._tick()
        if self.store:
            self.store.stop()
        for folder in self.scratch:
            shutil.rmtree(folder, ignore_errors=True)
        return None

    def _is_stopping(self) -> bool:
        """Whether something shall end soon, so that it pays to look often."""
        waits = [
            not child.gone and (child.exited or child.kill_at is not None)
            for child in self.children.values()
        ]
        return any(waits) or self._is_round_over()

    def _is_round_over(self) -> bool:
        gone = all(child.gone for child in self.children.values())
        return self.running and not self.hold and gone

    # What the launcher asks for

    def _read_requests(self) -> None:
        try:
            data = os.read(self.requests, CHUNK)
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(self.requests)
            self.end()
            return
        self.heard_launcher = time.monotonic()
        for request in self.inbox.feed(data):
            op = request.pop("op")
            try:
                getattr(self, f"on_{op}")(**request)
            except Exception as error:
                self.send(
                    event="failed",
                    op=op,
                    text=str(error)
                    if isinstance(error, UserError)
                    else f"{type(error).__name__}: {error}",
                    traceback=traceback.format_exc(),
                )
            if self.task is not None:
                return

    def on_prepare(
        self,
        *,
        env: dict[str, str | None],
        cwd: str | None,
        parent: int | None,
        local_workers: int | None,
        threads: int | None,
        preload: list[str],
        launcher_timeout: float = 0.0,
        idle: float = 0.0,
    ) -> None:
        self.parent = parent or 0
        self.launcher_timeout, self.idle_timeout, self.waits = launcher_timeout, idle, False
        told = set_up(env, cwd, local_workers, threads, preload)
        self.heard_launcher = time.monotonic()
        told |= {"host": socket.gethostname(), "machine": host_id()}
        self.send(event="ready", pid=os.getpid(), **told)

    def on_store(self, address: str) -> None:
        if self.store:
            self.store.stop()
        self.store = StoreHost(address)
        reachable = reachable_addresses() if self.store.is_open_to_all else [address]
        self.send(
            event="store", port=self.store.port, addresses=reachable, interfaces=own_addresses()
        )

    def on_reach(self, addresses: list[str], port: int) -> None:
        """Try which of the addresses of the store's host this host reaches, and through which of
        its own interfaces."""
        self.send(event="reached", **reach(addresses, port))

    def on_publish(self, key: str, value: str) -> None:
        if self.store:
            self.store.publish(key, value)

    def on_ping(self) -> None:
        """The launcher is alive, which `_read_requests` has noted."""

    def on_start(
        self,
        workers: list[dict[str, Any]],
        heartbeat_timeout: float,
        scratch: list[str],
        hold: bool = False,
    ) -> None:
        self.beat_timeout, self.scratch, self.hold = heartbeat_timeout, scratch, hold
        self.running = True
        # What exists now is never collected in the workers, so its pages stay shared.
        gc.collect()
        gc.freeze()
        if self.store:
            self.store.start(self.own_fds)
        for task in workers:
            if self._fork(task):
                return

    def on_again(self, worker: dict[str, Any]) -> None:
        self._fork(worker)

    def on_kill(self, rank: int) -> None:
        for child in self.children.values():
            if child.rank == rank and not child.gone:
                child.end(0.0)

    def on_stop(self, ranks: list[int] | None, grace: float) -> None:
        self.stop(ranks, grace)

    def on_signal(self, number: int) -> None:
        self.to_pass.append((number, time.monotonic()))

    def on_quit(self) -> None:
        self.end(grace=0.0)

    # Workers

    def _fork(self, task: dict[str, Any]) -> bool:
        task = as_python(task)
        child = Child(task["rank"], beats="program" not in task)
        pipes = [os.pipe() for _ in range(3)]
        agent = os.getpid()
        # A signal for the worker must not meet the agent's handlers in it.
        with processes.held_signals():
            pid = os.fork()
            if pid == 0:
                self.task = task
                private = [read for read, _ in pipes] + [
                    fd for other in self.children.values() for fd in other.fds
                ]
                try:
                    worker.enter(
                        task, agent, [write for _, write in pipes], [*private, *self.own_fds]
                    )
                except BaseException:
                    # Nothing may bring this copy of the agent back into its loop.
                    traceback.print_exc()
                    os._exit(1)
                return True
        child.pid = pid
        child.last_beat = time.monotonic()
        for index, (read, write) in enumerate(pipes):
            os.close(write)
            os.set_blocking(read, False)
            child.fds[read] = LineCutter() if index < 2 else LineReader()
            child.names[read] = index + 1
            self.selector.register(read, selectors.EVENT_READ, child)
        self.children[pid] = child
        self.send(event="started", rank=child.rank, pid=pid)
        if child.begun:
            self.send(event="begun", rank=child.rank)
        return False

    def _read_child(self, child: Child, fd: int) -> bool:
        """Read once from a worker's pipe; False when there is nothing more."""
        data = child.read(fd, self.send)
        if data == b"":
            self._close(child, fd)
        return bool(data)

    def _close(self, child: Child, fd: int) -> None:
        self.selector.unregister(fd)
        os.close(fd)
        del child.fds[fd]

    def _reap(self) -> None:
        for pid, status in processes.ended_children():
            child = self.children.get(pid)
            if child is None:
                continue
            now = time.monotonic()
            child.exited = True
            for fd in list(child.fds):
                while self._read_child(child, fd):
                    pass
            how = processes.exit_of(status)
            self.send(
                event="exit", rank=child.rank, own=child.own_end, age=time.monotonic() - now, **how
            )
            if processes.signal_group(pid, signal.SIGTERM) and child.kill_at is None:
                child.kill_at = now + LAST_GRACE

    def stop(self, ranks: list[int] | None, grace: float) -> None:
        """SIGTERM to the workers themselves, and SIGKILL to all that they started after `grace`
        seconds."""
        self.hold = False
        for child in self.children.values():
            if not child.gone and (ranks is None or child.rank in ranks):
                child.end(grace)

    def _pass_signals_on(self, now: float) -> None:
        for number, asked in [entry for entry in self.to_pass if now - entry[1] >= HEARD_TOO]:
            self.to_pass.remove((number, asked))
            living = [child for child in self.children.values() if not child.exited]
            if now - self.heard.get(number, float("-inf")) > 4 * HEARD_TOO:
                for child in living:
                    child.signal(number)
            if living:
                self.send(event="passed", number=number)

    def on_heard(self, number: int) -> None:
        """This process got a signal; safe in a signal handler."""
        self.heard[number] = time.monotonic()
        self.untold.append(number)

    def _tell_of_signals(self) -> None:
        """Tell the launcher of a signal that the workers have not got as well, because they do not
        run yet."""
        while self.untold:
            number = self.untold.pop(0)
            begun = all(child.begun or child.exited for child in self.children.values())
            if not (self.running and begun) and not self.waits:
                self.send(event="asked", number=number)

    # Time passes

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self.last_tick > LATE:
            self.heard_launcher = now
            for child in self.children.values():
                child.was_suspended(now)
        self._pass_signals_on(now)
        self._tell_of_signals()
        for child in self.children.values():
            if not child.gone:
                self._look_after(child, now)
        if self._is_round_over():
            self._finish_round()
        if now - self.last_tick >= TICK:
            self.last_tick = now
            # A process that the launcher forked may hold the other end of our pipe open after the
            # launcher's death.
            if self.parent and os.getppid() != self.parent:
                self.end()
            # A connection that is cut ends without a sign.
            if 0 < self.launcher_timeout < now - self.heard_launcher:
                self.end()
            if not self.running and 0 < self.idle_timeout < now - max(
                self.idle_since, self.heard_launcher
            ):
                self.end()
            self.send(event="alive")

    def _look_after(self, child: Child, now: float) -> None:
        child.kill_if_due(now)
        if child.exited:
            if not processes.signal_group(child.pid, 0):
                child.gone = True
                for fd in list(child.fds):
                    while self._read_child(child, fd):
                        pass
                    if fd in child.fds:
                        child.flush(fd, self.send)
                        self._close(child, fd)
            return
        if child.blamed or child.kill_at is not None or now - self.last_tick < TICK:
            return
        silent = child.silence(now, self.beat_timeout)
        if silent is not None:
            child.blamed = True
            seconds, state = silent
            self.send(event="silent", rank=child.rank, seconds=seconds, state=state, age=seconds)

    def _finish_round(self) -> None:
        # Descendants that left their group were adopted by this process when their parents ended.
        store = self.store.pid if self.store else 0
        left = [pid for pid in processes.children(os.getpid()) if pid != store]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        now = time.monotonic()
        self.sweep_until = self.sweep_until or now + LAST_GRACE + 10
        if left and now < self.sweep_until:
            return
        self.sweep_until = 0.0
        if self.store:
            self.store.stop()
            self.store = None
        self.children.clear()
        self.to_pass.clear()
        self.running, self.waits = False, self.idle_timeout > 0
        self.idle_since = time.monotonic()
        self.send(event="idle")


def main() -> None:
    """Serve the launcher on the standard streams; a forked worker goes on from here with the user's
    code."""
    requests = os.dup(0)
    events = os.dup(1)
    # What an import prints stays out of the conversation, and workers do not read from it.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    processes.adopt_orphans()
    agent = Agent(requests, events)
    # None of these is for this process, which ends when the launcher does or says so.
    for number in processes.REQUESTS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: agent.on_heard(number))
    processes.take_signals()
    task = agent.serve()
    if task is not None:
        del agent
        worker.run(task)


if __name__ == "__main__":
    # Under `-m` this file would exist twice, once as `__main__`, which the workers replace.
    sys.exit(importlib.import_module("allhands.launch.agent").main())
