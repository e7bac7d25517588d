"""Rank 0's side of the failure detector: hears all ranks, and decides which one failed first.

Only ranks that have proven the world's token are heard. Numbers and short texts travel, as lines of
JSON; nothing that arrives is run or unpickled.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

from allhands import wire

# Ends the report of a failure; a launcher that does not end by itself then is ended
# (allhands.launch.mpi).
LAST_WORDS = "all other ranks are ended"

BEAT_S = 1.0
# The first failure explains those that follow within this time; a death without a word is seen
# later than the errors that it causes.
COLLECT_S = 1.0
# Time for the others to write their own tracebacks.
GRACE_S = 2.0
# Requests to Slurm to end a step, GRACE_S seconds apart.
KILL_ATTEMPTS = 5
LONGEST_TEXT = 500
LONGEST_LINE = 8192


class FailureMonitor:
    """The connections of all ranks to rank 0. `run` belongs to a thread of its own.

    Args:
        size: ranks of the world.
        timeout: seconds of silence that count as a failure; 0 waits for ever.
        name: rank 0's host and process, for messages.
    """

    def __init__(self, size: int, timeout: float, name: str) -> None:
        self.over = threading.Event()  # set when all have been told to end
        self.closed = False  # rank 0 has left in order
        self._size, self._timeout = size, timeout
        self._names = {0: name}
        self._joined: set[int] = {0}
        # those that the thread does not know yet
        self._new: list[tuple[socket.socket, dict[str, Any]]] = []
        self._own: list[dict[str, Any]] = []  # rank 0's own messages, for the thread
        self._wake, self._wake_end = socket.socketpair()
        for end in (self._wake, self._wake_end):
            wire.close_in_children(end)
        self._heard: dict[socket.socket, float] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._lines: dict[socket.socket, wire.LineReader] = {}
        self._left: dict[int, float] = {}
        self._failures: list[tuple[float, int, str]] = []
        self._selector = selectors.DefaultSelector()
        self._decide_at: float | None = None
        self._silent = False

    def welcome(self, link: socket.socket, hello: dict[str, Any]) -> None:
        """Take a rank that has proven the token; called in the thread of an acceptor."""
        if "watchdog" not in hello:  # which only listens
            rank = int(hello["rank"])
            if rank in self._joined or not 0 < rank < self._size:
                raise wire.RefusedError(f"rank {rank} is here already, or none of {self._size}")
            self._joined.add(rank)
        self._new.append((link, hello))
        self._notify()

    def report(self, message: dict[str, Any]) -> None:
        """Take a message of rank 0 itself."""
        self._own.append(message)
        self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_end.send(b"!")

    def run(self) -> None:
        """Watch until a failure is reported, or all ranks have left."""
        try:
            self._watch()
        finally:
            self.over.set()

    def _watch(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ)
        beat_at = time.monotonic()
        suspension = wire.Suspension(3 * BEAT_S)
        while True:
            for key, _ in self._selector.select(0.1 if self._decide_at is not None else BEAT_S):
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                else:
                    self._read(key.data)
            while self._new:
                self._take(*self._new.pop(0))
            while self._own:
                self._hear(0, self._own.pop(0))
            now = time.monotonic()
            if suspension.ended(now):
                self._heard = dict.fromkeys(self._heard, now)
            if now - beat_at >= BEAT_S:
                beat_at = now
                self._tell({"beat": True})
            self._look_for_silence(now)
            if self._decide_at is not None and now >= self._decide_at:
                return self._decide()
            if len(self._left) == self._size or (self.closed and 0 in self._left):
                # Whoever outlives rank 0 has to do so without a failure detector.
                self._tell({"bye": True})
                return None

    def _take(self, link: socket.socket, hello: dict[str, Any]) -> None:
        link.setblocking(False)
        wire.keep_alive(link)
        if "rank" in hello:
            rank = self._ranks[link] = int(hello["rank"])
            self._names[rank] = str(hello["name"])[:LONGEST_TEXT]
        self._lines[link] = wire.LineReader(LONGEST_LINE)
        self._heard[link] = time.monotonic()
        self._selector.register(link, selectors.EVENT_READ, link)

    def _read(self, link: socket.socket) -> None:
        try:
            piece = link.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        if not piece:
            return self._lose(link, "is gone without a word: killed, crashed, or its host is down")
        self._heard[link] = time.monotonic()
        try:
            for message in self._lines[link].feed(piece):
                self._hear(self._ranks[link], message)
        except (wire.MessageError, KeyError) as error:
            return self._lose(link, f"has said what no rank says ({error})")
        return None

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if message.get("bye"):
            self._left[rank] = now
        if "failed" in message:
            self._blame(now, rank, str(message["failed"])[:LONGEST_TEXT])

    def _lose(self, link: socket.socket, how: str) -> None:
        rank = self._ranks.get(link)
        self._drop(link)
        known = rank in self._left or any(rank == failed for _, failed, _ in self._failures)
        if rank is not None and not known:
            # Its peers may have noticed its end, and failed over it, before this was seen.
            self._blame(time.monotonic() - COLLECT_S, rank, how)

    def _drop(self, link: socket.socket) -> None:
        self._selector.unregister(link)
        self._heard.pop(link, None)
        link.close()

    def _look_for_silence(self, now: float) -> None:
        if self._timeout <= 0:
            return
        for link, at in list(self._heard.items()):
            rank = self._ranks.get(link)
            if rank is not None and rank not in self._left and now - at > self._timeout:
                self._silent = True
                self._lose(
                    link,
                    f"has given no sign of life for {now - at:.0f} s: stopped, hung, or its "
                    "network is down",
                )

    def _blame(self, at: float, rank: int, how: str) -> None:
        self._failures.append((at, rank, how))
        if self._decide_at is None:
            self._decide_at = time.monotonic() + COLLECT_S

    def _decide(self) -> None:
        at, rank, how = min(self._failures)
        lines = [
            f"allhands: rank {rank} ({self._names.get(rank, 'unknown host')}) failed first: {how}"
        ]
        for other, left_at in sorted(self._left.items()):
            lines.append(
                f"  rank {other} ({self._names.get(other, 'unknown host')}) had already left, "
                f"{max(0.0, at - left_at):.1f} s "
                "earlier: if the others still waited for it, that is the cause"
            )
        after = sorted({failed for _, failed, _ in self._failures} - {rank})
        lines += [f"  failed after it: rank {', '.join(map(str, after))}"] if after else []
        print_error("\n".join([*lines, f"  {LAST_WORDS}"]))
        self._tell({"end": True})
        self.over.set()
        time.sleep(GRACE_S)
        if not self.closed:
            if self._silent:
                kill_step()
            leave()

    def _tell(self, message: dict[str, Any]) -> None:
        data = wire.encode(message)
        for link in list(self._heard):
            with contextlib.suppress(OSError):
                link.sendall(data)


def kill_step() -> None:
    """End the tasks of this step that cannot do so themselves, because they are stopped or hang;
    srun would wait for them. This process is one of them."""
    number = os.environ.get("SLURM_STEP_ID", os.environ.get("SLURM_STEPID"))
    step = f"{os.environ.get('SLURM_JOB_ID')}.{number}"
    if "None" in step:
        return
    why = "this task was not ended either"
    for _ in range(KILL_ATTEMPTS):  # a busy controller does not answer, or loses the signal
        try:
            subprocess.run(
                ["scancel", "--signal=KILL", step], capture_output=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            why = str(error)
        time.sleep(GRACE_S)
    print_error(f"allhands: the silent task could not be ended ({why}); write `scancel {step}`")


def leave() -> NoReturn:
    """End this process with exit code 1 from a thread, when its main thread cannot be relied on;
    buffered output is written."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    # The main thread may hold the lock of a stream that nobody reads.
    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(1.0)
    os._exit(1)


def print_error(text: str) -> None:
    """Write a line to standard error at once, whatever holds the stream's lock."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))
