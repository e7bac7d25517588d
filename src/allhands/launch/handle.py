"""The launcher's end of one agent."""

from __future__ import annotations

import collections
import subprocess
import time
from typing import Any

from allhands.launch.protocol import write_all
from allhands.wire import LineReader, encode

# Seconds beyond the grace period after which an agent that does not finish is given up.
OVERDUE = 20.0


class AgentHandle:
    """A process that speaks `protocol` on its standard streams: the agent, or what leads to it on
    another host.

    Args:
        process: with pipes as standard input and output.
        host: its name, for messages.
        local: its process ids are ours.
        said: the last lines that it printed on standard error, kept up to date by the caller.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        host: str,
        local: bool,
        said: collections.deque[bytes] | None = None,
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.host = host
        self.local = local
        self.requests = process.stdin.fileno()
        self.events = process.stdout.fileno()
        self.inbox = LineReader()
        self.noise = b""  # what a login shell printed before the agent came up
        self.early = b""  # events that arrived before anybody asked for them
        self.heard_at = time.monotonic()
        self.ready: dict[str, Any] | None = None
        # The newest event of each kind that answers a request.
        self.answers: dict[str, dict[str, Any]] = {}
        self.ranks: list[int] = []
        self.idle = True
        self.lost = False
        self._said = said if said is not None else collections.deque()

    def send(self, **request: Any) -> None:
        """Ask the agent for something. An agent that is gone is noticed by the end of its
        events."""
        try:
            write_all(self.requests, encode(request))
        except OSError:
            pass

    def kill(self) -> None:
        """End it at once; an agent on another host then loses its streams, and ends with all that
        it looks after."""
        self.process.kill()

    def long_silence(self, now: float, heartbeat_timeout: float, host_timeout: float) -> str | None:
        """What there is to say of its silence, where that is too long; else None.

        Args:
            now: `time.monotonic()`.
            heartbeat_timeout: seconds for an agent of this host; 0 waits for ever.
            host_timeout: seconds for one of another host.
        """
        silent, longest, what = now - self.heard_at, host_timeout, f"host {self.host}"
        if self.local:
            longest = heartbeat_timeout + 1 if heartbeat_timeout else float("inf")
            what = "the agent process"
        else:
            what += " (its network or the machine is down, or it was suspended)"
        if self.idle or self.lost or silent <= longest:
            return None
        return f"no word from {what} for {silent:.0f} s"

    def why_gone(self) -> str:
        """Why nothing more comes from it, as far as that is known."""
        if self.local:
            return "its agent process ended"
        try:
            code = self.process.wait(2)
        except subprocess.TimeoutExpired:
            return f"the connection to host {self.host} ended"
        last = b"".join(self._said).decode("utf-8", "replace").strip().splitlines()[-1:]
        about = f" ({last[0]})" if last else ""
        if code == 255:
            return (
                f"the connection to host {self.host} broke{about}: the host was switched off, "
                "or its network went down"
            )
        return f"the agent process on host {self.host} ended with exit code {code}{about}"

    def close(self, timeout: float = OVERDUE) -> None:
        """End the agent, which ends whatever it still looks after."""
        self.send(op="quit")
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    pass
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
