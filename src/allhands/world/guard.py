"""What ends a world that srun or mpirun started when one of its ranks fails.

srun waits for all tasks, however one of them ended (unless it was given ``-K``), MPI's launchers
end a job of which one rank dies but none of which one rank hangs, and a rank that computes, sleeps,
or waits in nccl does not notice that another one is gone: the job would hang until somebody looks.
So every rank keeps a connection to a thread in rank 0. A rank that raises says so over it; one that
dies (SIGKILL, a crash, a host that is switched off) closes it without a word; one that is stopped
or cut off falls silent. Rank 0 then says which rank failed first, on which host and why, and all
ranks end with exit code 1. A rank that leaves in order says that, and the others go on.

Launchers that look after their processes themselves (`allhands launch`, torchrun) need none of
this.

Only ranks that have proven the world's token are heard. Numbers and short texts travel, as lines of
JSON; nothing that arrives is run or unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

from allhands import wire
from allhands.errors import UserError, WorldError
from allhands.world import warden
from allhands.world.layout import Environ

TIMEOUT_VARIABLE = "ALLHANDS_HEARTBEAT_TIMEOUT"
DEFAULT_TIMEOUT_S = 60.0

# Ends the report of a failure; a launcher that does not end by itself then is ended
# (allhands.launch.mpi).
LAST_WORDS = "all other ranks are ended"

_BEAT_S = 1.0
# What fails together is told by the first failure; a death without a word is seen later than the
# errors that it causes.
_COLLECT_S = 1.0
# Time for the others to write their own tracebacks.
_GRACE_S = 2.0
# Exit codes of a rank that a signal asked to save and leave, as a training does.
_ON_REQUEST = tuple(128 + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
_LONGEST = 500
_LONGEST_LINE = 8192
# Of the ranks on one host, one says what none of them can hear from rank 0 any more.
_LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def heartbeat_timeout(environ: Environ) -> float:
    """Seconds without a sign of life that count as a failure; 0 waits for ever.

    Raises:
        UserError: ALLHANDS_HEARTBEAT_TIMEOUT is no such number.
    """
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


class Guard:
    """This rank's part in it; `start` makes one.

    Args:
        rank, size: who this is.
        timeout: seconds of silence that count as a failure; 0 waits for ever.
        link: the connection to rank 0; None on rank 0.
    """

    def __init__(
        self, rank: int, size: int, timeout: float, link: socket.socket | None = None
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.name = _own_name()
        self._link = link
        self.accepted: list[socket.socket] = []  # on rank 0: the others' connections
        self._came: list[
            tuple[socket.socket, dict[str, Any]]
        ] = []  # those that its thread does not know yet
        self._ranks: set[int] = {0}
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closed = False
        self._over = threading.Event()
        self._wake, self._wake_end = socket.socketpair()
        for end in (self._wake, self._wake_end):
            wire.close_in_children(end)
        self._own: list[dict[str, Any]] = []  # rank 0's own messages, for its thread
        self._exit_code = 0
        self._before: tuple[Any, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="allhands-guard", daemon=True)

    # ------------------------------------------------------------------ the main thread

    def open(self) -> None:
        """Begin to watch, and notice exceptions and exit codes of this process."""
        self._before = (sys.excepthook, sys.exit)
        sys.excepthook = self._on_exception
        sys.exit = self._on_exit
        self._thread.start()

    def welcome(self, link: socket.socket, said: dict[str, Any]) -> None:
        """On rank 0: take a rank that has proven the token.

        Raises:
            RefusedError: it is no other rank of this world, or is here already.
        """
        if "warden" not in said:  # which only listens
            rank = int(said["rank"])
            if rank in self._ranks or not 0 < rank < self.size:
                raise wire.RefusedError(f"rank {rank} is here already, or none of {self.size}")
            self._ranks.add(rank)
        self._came.append((link, said))
        self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_end.send(b"!")

    def close(self) -> None:
        """Leave in order: from now on, the end of this process is nobody's concern. A failing exit
        code is told instead."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        if self._before is not None:
            if sys.excepthook == self._on_exception:
                sys.excepthook = self._before[0]
            if sys.exit == self._on_exit:
                sys.exit = self._before[1]
        if self._exit_code:
            self._fail(f"left with exit code {self._exit_code}")
        else:
            self._say({"bye": True})
        if self.rank == 0:
            self._over.wait(_COLLECT_S + _GRACE_S if self._exit_code else 1.0)

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
        self._say({"failed": text[:_LONGEST]})
        if self.rank == 0:
            self._over.wait(_COLLECT_S + _GRACE_S)

    def _say(self, message: dict[str, Any]) -> None:
        if self.rank == 0:
            self._own.append(message)
            return self._notify()
        assert self._link is not None
        with self._lock, contextlib.suppress(OSError):
            self._link.sendall(wire.encode(message))
        return None

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            if self.rank == 0:
                _Watch(self).run()
            else:
                self._follow()
        finally:
            self._over.set()

    def _follow(self) -> None:
        """On another rank: show that it lives, and end it when rank 0 says so or is gone."""
        assert self._link is not None
        self._link.settimeout(_BEAT_S)
        heard = time.monotonic()
        lines = wire.LineReader(_LONGEST_LINE)
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
            _print(f"allhands: rank {self.rank} ({self.name}) ends because {why}")
        time.sleep(_GRACE_S)
        if not self._closed:
            if first and why is not None and "no sign of life" in why:
                kill_step()
            leave()


class _Watch:
    """Rank 0's side: hears all ranks, and decides who failed first."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.names: dict[int, str] = {}
        self.heard: dict[socket.socket, float] = {}
        self.ranks: dict[socket.socket, int] = {}
        self.lines: dict[socket.socket, wire.LineReader] = {}
        self.left: dict[int, float] = {}
        self.failed: list[tuple[float, int, str]] = []
        self.selector = selectors.DefaultSelector()
        self.decide_at: float | None = None
        self.silent = False

    def run(self) -> None:
        guard = self.guard
        self.names[0] = guard.name
        self.selector.register(guard._wake, selectors.EVENT_READ)
        beaten = time.monotonic()
        suspension = wire.Suspension(3 * _BEAT_S)
        while True:
            for key, _ in self.selector.select(0.1 if self.decide_at is not None else _BEAT_S):
                if key.fileobj is guard._wake:
                    guard._wake.recv(4096)
                else:
                    self._read(key.data)
            while guard._came:
                self._take(*guard._came.pop(0))
            while guard._own:
                self._hear(0, guard._own.pop(0))
            now = time.monotonic()
            if suspension.ended(now):
                self.heard = dict.fromkeys(self.heard, now)
            if now - beaten >= _BEAT_S:
                beaten = now
                self._tell({"beat": True})
            self._look_for_silence(now)
            if self.decide_at is not None and now >= self.decide_at:
                return self._decide()
            if len(self.left) == guard.size or (guard._closed and 0 in self.left):
                # Whoever outlives rank 0 has to do so without a guard.
                self._tell({"bye": True})
                return None

    def _take(self, link: socket.socket, said: dict[str, Any]) -> None:
        link.setblocking(False)
        wire.keep_alive(link)
        self.guard.accepted.append(link)
        if "rank" in said:
            rank = self.ranks[link] = int(said["rank"])
            self.names[rank] = str(said["name"])[:_LONGEST]
        self.lines[link] = wire.LineReader(_LONGEST_LINE)
        self.heard[link] = time.monotonic()
        self.selector.register(link, selectors.EVENT_READ, link)

    def _read(self, link: socket.socket) -> None:
        try:
            piece = link.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        if not piece:
            return self._lose(link, "is gone without a word: killed, crashed, or its host is down")
        self.heard[link] = time.monotonic()
        try:
            for message in self.lines[link].feed(piece):
                self._hear(self.ranks[link], message)
        except (wire.MessageError, KeyError) as error:
            return self._lose(link, f"has said what no rank says ({error})")
        return None

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if message.get("bye"):
            self.left[rank] = now
        if "failed" in message:
            self._blame(now, rank, str(message["failed"])[:_LONGEST])

    def _lose(self, link: socket.socket, how: str) -> None:
        rank = self.ranks.get(link)
        self._drop(link)
        told = rank in self.left or any(rank == failed for _, failed, _ in self.failed)
        if rank is not None and not told:
            # Its peers may have noticed its end, and failed over it, before this was seen.
            self._blame(time.monotonic() - _COLLECT_S, rank, how)

    def _drop(self, link: socket.socket) -> None:
        self.selector.unregister(link)
        self.heard.pop(link, None)
        link.close()

    def _look_for_silence(self, now: float) -> None:
        if self.guard.timeout <= 0:
            return
        for link, at in list(self.heard.items()):
            rank = self.ranks.get(link)
            if rank is not None and rank not in self.left and now - at > self.guard.timeout:
                self.silent = True
                self._lose(
                    link,
                    f"has given no sign of life for {now - at:.0f} s: stopped, hung, or its "
                    "network is down",
                )

    def _blame(self, at: float, rank: int, how: str) -> None:
        self.failed.append((at, rank, how))
        if self.decide_at is None:
            self.decide_at = time.monotonic() + _COLLECT_S

    def _decide(self) -> None:
        at, rank, how = min(self.failed)
        lines = [
            f"allhands: rank {rank} ({self.names.get(rank, 'unknown host')}) failed first: {how}"
        ]
        for other, left_at in sorted(self.left.items()):
            lines.append(
                f"  rank {other} ({self.names.get(other, 'unknown host')}) had already left, "
                f"{max(0.0, at - left_at):.1f} s "
                "earlier: if the others still waited for it, that is the cause"
            )
        after = sorted({failed for _, failed, _ in self.failed} - {rank})
        lines += [f"  failed after it: rank {', '.join(map(str, after))}"] if after else []
        _print("\n".join([*lines, f"  {LAST_WORDS}"]))
        self._tell({"end": True})
        self.guard._over.set()
        time.sleep(_GRACE_S)
        if not self.guard._closed:
            if self.silent:
                kill_step()
            leave()

    def _tell(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        for link in list(self.heard):
            with contextlib.suppress(OSError):
                link.sendall(data)


def kill_step() -> None:
    """End the tasks of this step that cannot do so themselves, because they are stopped or hang;
    srun would wait for them."""
    number = os.environ.get("SLURM_STEP_ID", os.environ.get("SLURM_STEPID"))
    step = f"{os.environ.get('SLURM_JOB_ID')}.{number}"
    if "None" in step:
        return
    try:
        subprocess.run(
            ["scancel", "--signal=KILL", step], capture_output=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        _print(f"allhands: the silent task could not be ended ({error}); write `scancel {step}`")


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


def start(
    store: Any,
    rank: int,
    size: int,
    host: str,
    timeout: float,
    deadline_s: float = 60.0,
    *,
    local: bool = False,
) -> Guard:
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
        guard = Guard(rank, size, timeout)
        listener, secret = wire.listen(local=local), secrets.token_hex(32)
        store.set("guard", json.dumps({"port": listener.getsockname()[1], "token": secret}))
        wire.Acceptor(
            "the failure detector in rank 0", [listener], secret.encode(), guard.welcome
        ).start()
        # What comes next may hold the interpreter until the others are there, who need an answer of
        # the acceptor's thread first. To wait for the store lets that run.
        try:
            store.wait(
                [f"guard of {other}" for other in range(1, size)], timedelta(seconds=2 * deadline_s)
            )
        except RuntimeError as error:
            raise WorldError(
                f"not all ranks reached rank 0 ({socket.gethostname()}) within "
                f"{2 * deadline_s:.0f} s: {error}"
            ) from None
    else:
        store.wait(["guard"])
        told = json.loads(store.get("guard"))
        port, token = int(told["port"]), str(told["token"]).encode()
        host = "127.0.0.1" if local else host

        def connect() -> socket.socket:
            return socket.create_connection((host, port), deadline_s)

        try:
            link = wire.join(connect, token, {"rank": rank, "name": _own_name()}, deadline_s)
            wire.keep_alive(link)
            if warden.needed(os.environ):
                warden.start(connect, token)
        except (OSError, EOFError, wire.RefusedError) as error:
            raise WorldError(
                f"rank {rank} ({socket.gethostname()}) cannot reach rank 0 at {host}, port {port} "
                f"({error}): "
                "workers talk to one another on ports that the system chooses; open the firewall "
                "between the hosts"
            ) from None
        store.set(f"guard of {rank}", "connected")
        guard = Guard(rank, size, timeout, link)
    guard.open()
    return guard


def _own_name() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))
