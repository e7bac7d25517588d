"""What the commands of the server and of a site need to look after the processes that they
start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from allhands.atomic_write import atomic_write
from allhands.errors import UserError
from allhands.launch import processes

#: The file of a state folder with what Flower's superexec proves itself by.
SECRET = "superexec.secret"


class Stopped(Exception):
    """A signal asked this process to end. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Turns SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 into `Stopped`, once. Ignored signals
    (nohup) stay ignored."""

    numbers = (*processes.REQUESTS, signal.SIGINT, signal.SIGHUP)

    def stop(number: int, _: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # the end takes a while, and is not to be cut short
        raise Stopped(number)

    before = processes.set_handlers(numbers, stop)
    try:
        yield
    finally:
        processes.restore_handlers(before)


@contextlib.contextmanager
def alone(state: Path, what: str) -> Iterator[None]:
    """Make a state folder, and hold it. Raises `UserError` when another server, or another site,
    does."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(state / f"{what}.lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another {what} uses the folder {state}; name another --state, or end that one"
            ) from None
        yield


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    out: Path | None,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that dies with this one. What it prints goes into the file `out`; None: to
    where this one's goes. It inherits the descriptors, under their numbers.

    To be called before this process has threads.
    """
    parent = os.getpid()
    with contextlib.ExitStack() as stack:
        file = None if out is None else stack.enter_context(out.open("wb"))
        # A session of its own: Ctrl-C in the terminal is for this process, which ends the others in
        # order.
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            pass_fds=descriptors,
            preexec_fn=lambda: processes.die_with_parent(parent),  # noqa: PLW1509
        )


def write_secretly(path: Path, content: bytes) -> None:
    """Write a file that only its user can read; whoever looks meanwhile sees the one before, or
    none."""
    with atomic_write(path) as aside:
        aside.touch(0o600, exist_ok=False)
        aside.write_bytes(content)
