"""Ends a world that srun or mpirun started when one of its ranks fails.

srun waits for all tasks, however one of them ended (unless it was given ``-K``), MPI's launchers
end a job of which one rank dies but none of which one rank hangs, and a rank that computes, sleeps,
or waits in nccl does not notice that another one is gone: the job would hang until somebody looks.
So every rank keeps a connection to a thread in rank 0. A rank that raises says so over it; one that
dies (SIGKILL, a crash, a host that is switched off) closes it without a word; one that is stopped
or cut off falls silent. Rank 0 then says which rank failed first, on which host and why, and all
ranks end with exit code 1. A rank that leaves in order says that, and the others go on.

Launchers that look after their processes themselves (`allhands launch`, torchrun) need none of
this.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

from allhands import wire
from allhands.errors import UserError, WorldError
from allhands.world import watchdog
from allhands.world.failure_monitor import (
    BEAT_S,
    COLLECT_S,
    GRACE_S,
    LONGEST_LINE,
    LONGEST_TEXT,
    FailureMonitor,
    kill_step,
    leave,
    print_error,
)
from allhands.world.layout import Environ

TIMEOUT_VARIABLE = "ALLHANDS_HEARTBEAT_TIMEOUT"
DEFAULT_TIMEOUT_S = 60.0

# Exit codes of a rank that a signal asked to save and leave, as a training does.
_ON_REQUEST = tuple(128 + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
# Of the ranks on one host, one says what none of them can hear from rank 0 any more.
_LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def heartbeat_timeout(environ: Environ) -> float:
    """Seconds without a sign of life that count as a failure; 0 waits for ever."""
    text = environ.get(TIMEOUT_VARIABLE, "").strip()
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds != 0 and not 3 <= seconds < 10**6:
        raise UserError(
            f"{TIMEOUT_VARIABLE}={text!r}: it must be a number of seconds, at least 3, or 0 to "
            "wait for ever."
        )
    return seconds


class FailureDetector:
    """This rank's end of the connection to rank 0, or rank 0 itself; `start` makes one.

    Args:
        rank: who this is.
        timeout: seconds of silence that count as a failure; 0 waits for ever.
        link: the connection to rank 0; None on rank 0.
        monitor: rank 0's side, on rank 0; None on the others.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        link: socket.socket | None = None,
        monitor: FailureMonitor | None = None,
    ) -> None:
        self.rank, self.timeout = rank, timeout
        self._link, self._monitor = link, monitor
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closed = False
        self._exit_code = 0
        self._before: tuple[Any, Any] | None = None
        self._thread = threading.Thread(
            target=monitor.run if monitor is not None else self._follow,
            name="allhands-failure-detector",
            daemon=True,
        )

    # ------------------------------------------------------------------ the main thread

    def open(self) -> None:
        """Begin to watch, and notice exceptions and exit codes of this process."""
        self._before = (sys.excepthook, sys.exit)
        sys.excepthook = self._on_exception
        sys.exit = self._on_exit
        self._thread.start()

    def close(self) -> None:
        """Leave in order: from now on, the end of this process is nobody's concern. A failing exit
        code is told instead."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        if self._monitor is not None:
            self._monitor.closed = True
        if self._before is not None:
            if sys.excepthook == self._on_exception:
                sys.excepthook = self._before[0]
            if sys.exit == self._on_exit:
                sys.exit = self._before[1]
        if self._exit_code:
            self._fail(f"left with exit code {self._exit_code}")
        else:
            self._say({"bye": True})
        if self._monitor is not None:
            self._monitor.over.wait(COLLECT_S + GRACE_S if self._exit_code else 1.0)

    def _on_exit(self, code: Any = None) -> NoReturn:
        # Python does not tell an exit handler the code that the process ends with. A bare `raise
        # SystemExit(3)` is not seen: it counts as leaving in order, and the report names the rank
        # when others fail over its absence.
        number = code if isinstance(code, int) else 0 if code is None else 1
        if threading.current_thread() is threading.main_thread() and os.getpid() == self._owner:
            self._exit_code = 0 if number in _ON_REQUEST else number & 0xFF
        raise SystemExit(code)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        assert self._before is not None
        self._before[0](kind, error, trace)
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        if os.getpid() == self._owner and not self._closed:
            first, _, more = str(error).partition("\n")
            self._fail(
                f"raised {kind.__name__}" + (f": {first}{' ...' if more else ''}" if first else "")
            )

    def _fail(self, text: str) -> None:
        self._say({"failed": text[:LONGEST_TEXT]})
        if self._monitor is not None:
            self._monitor.over.wait(COLLECT_S + GRACE_S)

    def _say(self, message: dict[str, Any]) -> None:
        if self._monitor is not None:
            return self._monitor.report(message)
        assert self._link is not None
        with self._lock, contextlib.suppress(OSError):
            self._link.sendall(wire.encode(message))
        return None

    # ------------------------------------------------------------------ the thread

    def _follow(self) -> None:
        """On another rank: show that it lives, and end it when rank 0 says so or is gone."""
        assert self._link is not None
        self._link.settimeout(BEAT_S)
        heard = time.monotonic()
        lines = wire.LineReader(LONGEST_LINE)
        while not self._closed:
            self._say({"beat": True})
            try:
                piece = self._link.recv(4096)
            except TimeoutError:
                silent = time.monotonic() - heard
                if 0 < self.timeout < silent:
                    self._end(f"rank 0 has given no sign of life for {silent:.0f} s")
                continue
            except OSError as error:
                piece = b""
                if not self._closed:
                    self._end(f"the connection to rank 0 broke ({error.strerror or error})")
            if not piece:
                return self._end("rank 0 is gone without a word: killed, or its host is down")
            heard = time.monotonic()
            for message in lines.feed(piece):
                if message.get("bye"):
                    return None
                if message.get("end"):
                    return self._end(None)
        return None

    def _end(self, why: str | None) -> None:
        """End this process, which has a moment to end by itself; `why` is for when rank 0 cannot
        say it."""
        if self._closed:
            return
        first = self.rank == 1 or "0" in (os.environ.get(name) for name in _LOCAL_RANKS)
        if why is not None and first:
            print_error(f"allhands: rank {self.rank} ({_own_name()}) ends because {why}")
        time.sleep(GRACE_S)
        if not self._closed:
            if first and why is not None and "no sign of life" in why:
                kill_step()
            leave()


def start(
    store: Any,
    rank: int,
    size: int,
    host: str,
    timeout: float,
    deadline_s: float = 60.0,
    *,
    local: bool = False,
) -> FailureDetector:
    """Connect this rank; on all ranks together, after they have met.

    Args:
        store: a `torch.distributed.Store` that all ranks share.
        rank, size: who this is.
        host: under which this rank reaches rank 0.
        timeout: see `heartbeat_timeout`.
        deadline_s: seconds in which rank 0 must be reached.
        local: all ranks are on one host; nobody else can then connect.

    Raises:
        WorldError: rank 0 was not reached.
    """
    if rank == 0:
        monitor = FailureMonitor(size, timeout, _own_name())
        listener, secret = wire.listen(local=local), secrets.token_hex(32)
        store.set(
            "failure detector", json.dumps({"port": listener.getsockname()[1], "token": secret})
        )
        wire.Acceptor(
            "the failure detector in rank 0", [listener], wire.job_token(secret), monitor.welcome
        ).start()
        # What comes next may hold the interpreter until the others are there, who need an answer of
        # the acceptor's thread first. To wait for the store lets that run.
        try:
            store.wait(
                [f"failure detector of {other}" for other in range(1, size)],
                timedelta(seconds=2 * deadline_s),
            )
        except RuntimeError as error:
            raise WorldError(
                f"not all ranks reached rank 0 ({socket.gethostname()}) within "
                f"{2 * deadline_s:.0f} s: {error}"
            ) from None
        detector = FailureDetector(rank, timeout, monitor=monitor)
    else:
        store.wait(["failure detector"])
        contact = json.loads(store.get("failure detector"))
        port, token = int(contact["port"]), wire.job_token(str(contact["token"]))
        host = "127.0.0.1" if local else host

        def connect() -> socket.socket:
            return socket.create_connection((host, port), deadline_s)

        try:
            link = wire.join(connect, token, {"rank": rank, "name": _own_name()}, deadline_s)
            wire.keep_alive(link)
            if watchdog.needed(os.environ):
                watchdog.start(connect, token)
        except (OSError, EOFError, wire.RefusedError) as error:
            raise WorldError(
                f"rank {rank} ({socket.gethostname()}) cannot reach rank 0 at {host}, port {port} "
                f"({error}): workers talk to one another on ports that the system chooses; open "
                "the firewall between the hosts"
            ) from None
        store.set(f"failure detector of {rank}", "connected")
        detector = FailureDetector(rank, timeout, link=link)
    detector.open()
    return detector


def _own_name() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"
