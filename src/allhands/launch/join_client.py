"""`allhands join`: an agent on this machine for a job that runs elsewhere.

After both sides have proven the job's token, the connection carries what the launcher and the agent
say to each other. This process stands between the two, so that its end is that of the agent, and
with it of the workers.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

from allhands import wire
from allhands.errors import UserError, WorkerError
from allhands.launch.handle import AgentHandle
from allhands.launch.local import start_agent
from allhands.launch.output import show
from allhands.launch.processes import restore_handlers
from allhands.launch.protocol import CHUNK
from allhands.launch.python import versions
from allhands.wire import LineReader

_CONNECT_S = 10.0
# The launcher answers between two looks at its workers.
_ANSWER_S = 60.0
_LONGEST_ANSWER = 1 << 16


def address_of(text: str) -> tuple[str, int]:
    """The host and port of `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"{text!r} is no address; write HOST:PORT, as the launcher of the job has printed it"
        )
    return host, int(port)


def join(address: str, token: str, workers: int, grace: float) -> int:
    """Add workers to a job, and see them through.

    Args:
        address: of its launcher, `HOST:PORT`.
        token: of the job.
        workers: how many.
        grace: seconds to leave for workers, where this process is told to end.

    Returns:
        0 when the job, or this process's part in it, has ended; else 1.

    Raises:
        UserError: the job cannot be reached, or refuses; says why.
        WorkerError: the agent could not be started.
    """
    link = _introduced(address, token, workers)
    _say(f"joined the job at {address}, which starts {workers} worker{'s' * (workers > 1)} here")
    return _Carrier(link, start_agent(), grace).run()


def _introduced(address: str, token: str, workers: int) -> socket.socket:
    place = address_of(address)
    said = {"host": socket.gethostname(), "workers": workers, "versions": versions()}
    try:
        link = wire.join(
            lambda: socket.create_connection(place, _CONNECT_S), token.encode(), said, _CONNECT_S
        )
    except wire.RefusedError as error:
        raise UserError(
            f"the job at {address} refuses this host: {error}. Copy the token's file that its "
            "launcher has named once more; each job has its own"
        ) from None
    except (OSError, EOFError) as error:
        raise UserError(
            f"no job answers at {address} ({error}): it has ended, or this machine does not reach "
            "that address; the launcher has printed all that it has"
        ) from None
    try:
        answer = wire.read_message(link, time.monotonic() + _ANSWER_S, _LONGEST_ANSWER)
    except (OSError, EOFError, ValueError) as error:
        link.close()
        raise UserError(
            f"the job at {address} did not answer ({error}): it has ended, or is about to"
        ) from None
    if "refused" in answer:
        link.close()
        raise UserError(f"the job at {address} refuses this host: {answer['refused']}")
    wire.keep_alive(link)
    return link


class _Carrier:
    """Carries lines between the launcher and the agent of this machine."""

    def __init__(self, link: socket.socket, agent: AgentHandle, grace: float) -> None:
        self._link, self._agent, self._grace = link, agent, grace
        self._requests, self._events = LineReader(), LineReader()
        self._running: set[int] = set()  # ranks
        self._leave_by: float | None = None  # told to end
        self._over = False  # the launcher lets go of this host
        self._signals = 0

    def run(self) -> int:
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            return self._carry()
        finally:
            restore_handlers(before)
            self._agent.close()
            self._link.close()

    def _on_signal(self, _number: int, _: FrameType | None) -> None:
        self._signals += 1

    def _carry(self) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ, self._from_launcher)
            selector.register(self._agent.events, selectors.EVENT_READ, self._from_agent)
            while True:
                for key, _ in selector.select(0.2):
                    if not key.data():
                        return self._ended()
                if self._signals and self._leave_by is None:
                    self._leave_by = time.monotonic() + self._grace
                    self._agent.send(op="signal", number=int(signal.SIGTERM))
                late = self._leave_by is not None and time.monotonic() > self._leave_by
                if self._leave_by is not None and (not self._running or late or self._signals > 1):
                    _say("the workers of this host have left the job")
                    return 0

    def _ended(self) -> int:
        if self._over:
            return 0
        raise WorkerError(
            "the job is gone: its launcher was killed, its network is down, or the agent here ended"
        )

    def _from_launcher(self) -> bool:
        try:
            data = self._link.recv(CHUNK)
        except OSError:
            data = b""
        for request in self._requests.feed(data):
            if request["op"] == "quit":
                _say("the job has let go of this host")
                self._over = True
            if request["op"] == "dismissed":
                raise UserError(f"the job lets go of this host: {request['why']}")
            self._agent.send(**request)
        return bool(data)

    def _from_agent(self) -> bool:
        data = os.read(self._agent.events, CHUNK)
        for event in self._events.feed(data):
            self._note(event)
        try:
            self._link.sendall(data)
        except OSError:
            return False
        return bool(data)

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self._running.add(event["rank"])
        elif event["event"] == "exit":
            self._running.discard(event["rank"])


def _say(text: str) -> None:
    show(sys.stderr, f"allhands: {text}\n".encode("utf-8", "backslashreplace"))
