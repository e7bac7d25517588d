"""Which worker failed first, why, and how that is told."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from allhands.launch.processes import REQUESTS, signal_name

# An exit is seen only after the process is gone, when its peers have long noticed broken
# connections. An exit that the worker did not announce (SIGKILL, os._exit) therefore counts as this
# much earlier than it was seen.
_UNSEEN = 1.0

# What errors of gloo, nccl and the store say where a peer is gone, whose failure may be the cause.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection was likely closed",
    "remote process exit",
    "ncclRemoteError",
    "the process group was aborted, as a worker is lost",
    "the members of the world have changed again",
)

# What to do where a script imports a package whose calls are here.
_HERE = {
    "horovod": "start it with allhands launch --horovod, and `import horovod` finds what is here",
    "catalyst": "write `from allhands.catalyst import dl, metrics` (docs/migrate_catalyst.md)",
    "coala": "write `import allhands.federated as coala` (docs/migrate_coala.md)",
    "mxnet": "write `from allhands import kvstore as kv` (docs/kvstore.md)",
}

_STATES = {
    "T": "it is stopped (state T), by SIGSTOP or a debugger",
    "D": "it waits in the kernel (state D), as for a disk or a network file system that does not "
    "answer",
    "R": "it computes (state R) without ever releasing the interpreter's lock",
    "S": "it sleeps (state S) without releasing the interpreter's lock",
}


@dataclass
class Worker:
    """What is known of one worker, or of one server. Times are those of the launcher's monotonic
    clock.

    Servers are counted below zero: rank -1 is server 0.
    """

    rank: int
    host: str
    pid: int = 0
    raised: dict[str, Any] | None = None
    raised_at: float = 0.0
    leaving: int | None = None  # the exit code that it announced when its code had ended
    leaving_at: float = 0.0
    silent: dict[str, Any] | None = None
    silent_at: float = 0.0
    lost: str | None = None  # why nothing more can be heard of it
    lost_at: float = 0.0
    exit: dict[str, Any] | None = None
    exit_at: float = 0.0
    stop_at: float | None = None  # when it was told to stop
    own_end: bool = True  # it ended, or was ending, before it was told to stop
    returned: dict[str, Any] | None = None
    must_return: bool = False  # its end without a result is a failure
    tail: list[bytes] = field(default_factory=list)

    @property
    def is_server(self) -> bool:
        """Whether it is a parameter server, which serves until the last worker has ended."""
        return self.rank < 0

    @property
    def name(self) -> str:
        return f"server {-self.rank - 1}" if self.is_server else f"rank {self.rank}"

    def note(self, kind: str, event: Mapping[str, Any], at: float) -> None:
        """Take in what the agent has reported of it, which happened at that time."""
        if kind == "started":
            self.pid = event["pid"]
        elif kind == "returned":
            self.returned = event["value"]
        elif kind == "raised":
            self.raised, self.raised_at = event["value"], at
        elif kind == "leaving":
            self.leaving, self.leaving_at = event["value"], at
        elif kind == "silent":
            self.silent, self.silent_at = dict(event), at
        elif kind == "exit":
            self.exit = {name: event[name] for name in ("code", "signal") if name in event}
            self.exit_at, self.own_end = at, event["own"]

    def lose(self, why: str, here: bool) -> None:
        """Nothing more can be heard of it. What it has started is ended, where it runs here."""
        if self.exit is not None:
            return
        self.lost, self.lost_at = why, time.monotonic()
        if here and self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def stopped_after(self) -> int | None:
        """The signal after which it stopped on request; None otherwise.

        It left by itself with exit code 128 + N: a training that has saved says so with this code.
        """
        code = self.leaving if self.leaving is not None else (self.exit or {}).get("code", 0)
        return code - 128 if code - 128 in REQUESTS and self.raised is None else None

    def left_at(self) -> float:
        """When it announced its end, or was seen to have ended."""
        return self.leaving_at if self.leaving is not None else self.exit_at

    def failed_at(self) -> float | None:
        """When it failed by itself; None when it did not, or only because it was told to stop."""
        times = []
        if self.raised is not None:
            times.append(self.raised_at)
        if self.silent is not None:
            times.append(self.silent_at)
        if self.lost is not None:
            times.append(self.lost_at)
        on_request = self.stopped_after() is not None
        if (
            not on_request
            and self.leaving is not None
            and (self.leaving or (self.must_return and self.returned is None))
        ):
            times.append(self.leaving_at)
        if not on_request and self.exit is not None and self._exit_is_failure():
            announced = self.leaving is not None or self.raised is not None
            number = self.exit.get("signal")
            if self.own_end:
                seen = self.exit_at if self.stop_at is None else min(self.exit_at, self.stop_at)
                # SIGABRT is how libraries answer a connection that broke, so it may itself be a
                # consequence.
                times.append(seen if announced or number == signal.SIGABRT else seen - _UNSEEN)
        times = [at for at in times if self.stop_at is None or at <= self.stop_at]
        return min(times, default=None)

    @property
    def is_echo(self) -> bool:
        """Whether its failure says no more than that a peer is gone, whose failure may be the
        cause."""
        if self.silent is not None or self.lost is not None:
            return False
        if self.raised is not None:
            return any(sign in self.raised["text"] for sign in _LOST_PEER)
        return self.leaving is None and (self.exit or {}).get("signal") == signal.SIGABRT

    def _exit_is_failure(self) -> bool:
        if self.exit == {"code": 0}:
            return self.is_server or (self.must_return and self.returned is None)
        return True

    def exit_code(self) -> int:
        """The launcher's exit code when this worker failed first."""
        if (
            self.silent is not None
            or self.lost is not None
            or (self.exit is None and self.raised is None)
        ):
            return 128 + signal.SIGKILL
        # A teardown that hung was ended by us; what the worker announced before is its own.
        if self.leaving:
            return self.leaving
        if self.exit is None or (
            self.raised is not None and self.stop_at is not None and "signal" in self.exit
        ):
            return 1
        if "signal" in self.exit:
            return 128 + int(self.exit["signal"])
        return int(self.exit["code"]) or 1

    def cause(self) -> str:
        """Why it failed, in a few words."""
        if self.silent is not None:
            about = _STATES.get(
                self.silent["state"], f"process state {self.silent['state'] or 'unknown'}"
            )
            if self.silent["state"] == "T":
                return f"no progress for {self.silent['seconds']:.0f} s: {about}"
            return f"no heartbeat for {self.silent['seconds']:.0f} s: {about}"
        if self.raised is not None:
            text, _, more = self.raised["text"].partition("\n")
            text += " ..." if more else ""
            return text if text.startswith("cannot run ") else f"raised {text}"
        if self.lost is not None:
            return self.lost
        if self.leaving is None and self.exit is not None and "signal" in self.exit:
            hint = " (out of memory? see `dmesg`)" if self.exit["signal"] == signal.SIGKILL else ""
            return f"killed by {signal_name(self.exit['signal'])}{hint}"
        if self.leaving == 0 and self.exit is not None and "signal" in self.exit:
            return (
                f"had finished with exit code 0, then {signal_name(self.exit['signal'])} ended "
                "it while Python shut down"
            )
        if (number := self.stopped_after()) is not None:
            return f"left on request, by {signal_name(number)}"
        code = (
            self.leaving if self.leaving is not None else (self.exit or {}).get("code", "unknown")
        )
        if self.must_return and self.returned is None:
            return f"left with exit code {code} before its function returned"
        if self.is_server and not code:
            return "left with exit code 0 while workers still needed it"
        return f"exit code {code}"


def first_of(failed: Iterable[Worker]) -> Worker | None:
    """The one of some workers that failed first by itself.

    News of a failure takes its time, which differs from host to host. So one that only echoes the
    loss of a peer is not the first where another has failed otherwise.
    """
    found = [one for one in failed if one.failed_at() is not None]
    return min(found, key=lambda one: (one.is_echo, one.failed_at() or 0.0, one.rank), default=None)


def _ranks(workers: list[Worker]) -> str:
    ranks = [worker for worker in workers if not worker.is_server]
    named = (
        [
            ("rank " if len(ranks) == 1 else "ranks ")
            + ", ".join(str(worker.rank) for worker in ranks)
        ]
        if ranks
        else []
    )
    return ", ".join([*named, *(worker.name for worker in workers if worker.is_server)])


def describe(
    first: Worker, workers: list[Worker], log_path: object, grace: float, with_traceback: bool
) -> str:
    """The report of a failure, as text of a few lines.

    Args:
        first: the worker that failed first.
        workers: all of them.
        log_path: the file with everything that `first` printed, or None.
        grace: seconds between SIGTERM and SIGKILL.
        with_traceback: show the traceback of `first` instead of its last lines of output, which for
            a script contain it.
    """
    where = f"{first.host}, pid {first.pid}" if first.pid else first.host
    lines = [f"allhands: {first.name} ({where}) failed first: {first.cause()}"]
    text = "" if first.raised is None else str(first.raised["text"])
    missing = text.removeprefix("ModuleNotFoundError: No module named ").strip("'")
    if missing in _HERE:
        lines.append(f"  {_HERE[missing]}")
    failed_at = first.failed_at() or time.monotonic()
    for worker in workers:
        in_order = (
            worker.exit == {"code": 0} and not worker._exit_is_failure()
        ) or worker.stopped_after() is not None
        if worker is not first and in_order and worker.left_at() < failed_at + _UNSEEN:
            ago = max(0.0, failed_at - worker.left_at())
            code = 128 + (worker.stopped_after() or -128)
            lines.append(
                f"  {worker.name} had already left with exit code {code}, {ago:.1f} s earlier: "
                "if the others still waited for it, that is the cause"
            )
    shown = first.tail
    title = "its last lines:"
    if with_traceback and first.raised is not None and first.raised.get("traceback"):
        shown = first.raised["traceback"].rstrip("\n").encode("utf-8", "replace").split(b"\n")
        title = "its traceback:"
    if shown:
        lines += _quote(title, shown)
    others = [worker for worker in workers if worker is not first]
    failed = [worker for worker in others if worker.failed_at() is not None]
    # Where the others go on without a worker that fails.
    before = [
        worker
        for worker in failed
        if (worker.failed_at() or failed_at) < failed_at and worker.is_echo <= first.is_echo
    ]
    if before:
        lines.append(f"  failed before it, which did not end the job: {_ranks(before)}")
    after = [worker for worker in failed if worker not in before]
    if after:
        lines.append(f"  failed after it: {_ranks(after)}")
    stopped = [worker for worker in others if worker.stop_at is not None and worker not in failed]
    killed = [worker for worker in stopped if worker.exit == {"signal": int(signal.SIGKILL)}]
    if stopped:
        if killed:
            ended = f"; {_ranks(killed)} did not end within {grace:g} s of SIGTERM and got SIGKILL"
        else:
            ended = ""
        lines.append(f"  stopped because of it: {_ranks(stopped)}{ended}")
    if log_path is not None:
        lines.append(f"  everything it printed: {log_path}")
    return "\n".join(lines)


def _quote(title: str, shown: list[bytes]) -> list[str]:
    return [
        f"  {title}",
        *(f"    | {line[:2000].decode('utf-8', 'backslashreplace')}" for line in shown),
    ]


def describe_excused(worker: Worker, then: str, log_path: object, with_tail: bool = True) -> str:
    """The report of a failure that does not end the job, without "allhands: " before it.

    Args:
        worker: which failed.
        then: what follows.
        log_path: the file with everything that it printed, or None.
        with_tail: show its last lines as well.
    """
    cause = worker.cause()
    cause = f"was {cause}" if cause.startswith("killed by ") else f"failed: {cause}"
    lines = [f"{worker.name} on host {worker.host} {cause}; {then}"]
    if with_tail and worker.tail:
        lines += _quote("its last lines:", worker.tail)
    if log_path is not None:
        lines.append(f"  everything it printed: {log_path}")
    return "\n".join(lines)


def describe_end_without(failed: list[Worker], workers: int) -> str:
    """One line on a job that came to its end without some of its `workers`; without "allhands: "
    before it."""
    each = "; ".join(
        f"{worker.name} ({worker.host}): {worker.cause()}"
        for worker in sorted(failed, key=lambda one: one.rank)
    )
    return f"{len(failed)} of {workers} workers failed, and the others came to their end: {each}"


def describe_stop(number: int, workers: list[Worker], launcher_got_it: bool) -> str:
    """One line on a job that ended because it was asked to, and not by a failure.

    Args:
        number: the signal that asked.
        workers: all of them.
        launcher_got_it: the launcher stopped the workers; otherwise they stopped by themselves.
    """
    name = signal_name(number)
    parts = [
        f"allhands: stopped by {name}"
        if launcher_got_it
        else f"allhands: the workers stopped after {name}"
    ]
    killed = [
        worker
        for worker in workers
        if worker.stop_at is not None and worker.exit == {"signal": int(signal.SIGKILL)}
    ]
    if killed:
        parts.append(f"{_ranks(killed)} had not ended in time and got SIGKILL")
    parts.append("no worker is left")
    return "; ".join(parts)
