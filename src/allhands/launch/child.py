"""One worker, as the agent that forked it sees it: its pipes, its heartbeat, how it is told to
end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from allhands.launch import processes
from allhands.launch.lines import LineCutter
from allhands.launch.protocol import CHUNK, text_of
from allhands.wire import LineReader

# What a worker reports that the launcher is told.
_EVENTS = ("raised", "leaving", "returned", "message", "loaded", "joining", "laid_out", "taken_up")
# Seconds a worker may be in the stopped state before that counts as a failure.
STOPPED_FOR = 5.0


class Child:
    """A worker of this host. `beats`: it sends heartbeats, which Python does and other programs do
    not."""

    def __init__(self, rank: int, beats: bool) -> None:
        self.rank = rank
        self.pid = 0
        self.beats = beats
        self.fds: dict[int, LineCutter | LineReader] = {}
        self.names: dict[int, int] = {}  # reading end -> 1 (stdout), 2 (stderr) or 3 (reports)
        self.last_beat = time.monotonic()
        self.stopped_since: float | None = None
        self.blamed = False
        self.begun = not beats  # it runs the user's code; other programs than Python do at once
        self.told = False  # to stop
        self.own_end = True  # it ended, or was ending, before it was told to
        self.exited = False
        self.gone = False
        self.kill_at: float | None = None

    def read(self, fd: int, send: Callable[..., None]) -> bytes | None:
        """Read once from one of its pipes, and tell the launcher.

        Args:
            fd: the reading end.
            send: tells an event.

        Returns:
            What was read, b"" at the end; None when there is nothing now, or the pipe is closed.
        """
        cutter = self.fds.get(fd)
        if cutter is None:
            return None
        if not self.begun and isinstance(cutter, LineCutter):
            # That it has begun is told before anything that it prints, so that who reads that may
            # send it a signal.
            for other in [other for other in self.fds if self.names[other] == 3]:
                self.read(other, send)
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if isinstance(cutter, LineCutter):
            self._print(fd, cutter.feed(data) if data else cutter.flush(), send)
        else:
            for message in cutter.feed(data):
                self._hear(message, send)
        return data

    def flush(self, fd: int, send: Callable[..., None]) -> None:
        """Tell the launcher of a last line without an end."""
        cutter = self.fds[fd]
        self._print(fd, cutter.flush() if isinstance(cutter, LineCutter) else b"", send)

    def _print(self, fd: int, lines: bytes, send: Callable[..., None]) -> None:
        if lines:
            send(event="out", rank=self.rank, fd=self.names[fd], text=text_of(lines))

    def _hear(self, message: dict[str, Any], send: Callable[..., None]) -> None:
        self.last_beat = time.monotonic()
        if "beat" in message:
            return
        if "begun" in message:
            self.begun = True
            send(event="begun", rank=self.rank)
            return
        age = time.monotonic() - message.pop("at", time.monotonic())
        for event in _EVENTS:
            if event in message:
                send(event=event, rank=self.rank, value=message[event], age=age)

    def signal(self, number: int) -> None:
        """Signal the worker itself, not what it has started."""
        if not self.exited:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, grace: float) -> None:
        """SIGTERM now, and SIGKILL for it and all that it started after `grace` seconds
        (`kill_if_due`)."""
        if not self.told and not self.exited:
            self.told, self.own_end = True, processes.is_ending(self.pid)
        if grace > 0:
            # A stopped process sees SIGTERM only once it goes on.
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
        kill_at = time.monotonic() + grace
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def kill_if_due(self, now: float) -> None:
        """SIGKILL when its grace is over."""
        if self.kill_at is not None and now >= self.kill_at:
            self.signal(signal.SIGKILL)
            processes.signal_group(self.pid, signal.SIGKILL)

    def was_suspended(self, now: float) -> None:
        """Forgive the silence until now: this whole host, or job, was suspended."""
        self.last_beat, self.stopped_since = now, None

    def silence(self, now: float, beat_timeout: float) -> tuple[float, str] | None:
        """For how many seconds it has given no sign of life, and its state, when that is too long.

        Args:
            now: `time.monotonic()`.
            beat_timeout: seconds without a heartbeat that are too long; 0 waits for ever.
        """
        state = processes.state(self.pid)
        self.stopped_since = (self.stopped_since or now) if state == "T" else None
        if self.stopped_since is not None and now - self.stopped_since > STOPPED_FOR:
            return now - self.stopped_since, state
        if self.beats and state not in ("T", "t") and 0 < beat_timeout < now - self.last_beat:
            return now - self.last_beat, state
        if state == "t":
            self.last_beat = now  # a debugger holds it
        return None
