"""Keepers that wait for the next call: with ALLHANDS_KEEPER_IDLE=60, a `spawn` within a minute of
the last one starts at once.

Most of the time in which workers start goes into importing torch. A keeper whose round is over has
done that already, and is
otherwise as clean as a new one: user code runs only in the workers that it forks. It is used again
by the same process with the
same variables, and ends by itself when it is not, and with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from allhands.errors import UserError
from allhands.launch.handle import KeeperHandle
from allhands.launch.local import start_keeper

VARIABLE = "ALLHANDS_KEEPER_IDLE"
# A keeper that is about to end is not taken.
_MARGIN = 2.0
# Changes all the time and means nothing to a process that starts; workers get its present value.
_CHANGING = ("PYTEST_CURRENT_TEST",)


@dataclass(frozen=True)
class Key:
    """What two calls must have in common to share a keeper: it fixed all that when it started."""

    process: int
    threads: int | None
    workers: int | None
    variables: frozenset[tuple[str, str]]


_waiting: dict[Key, tuple[KeeperHandle, float]] = {}
_lock = threading.Lock()
_kept_for = 0.0


def idle_seconds() -> float:
    """For how long a keeper waits for another call; 0, the default, ends it with the first one.

    Raises:
        UserError: ALLHANDS_KEEPER_IDLE is no number of seconds.
    """
    text = os.environ.get(VARIABLE, "").strip()
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 10**6:
        raise UserError(f"{VARIABLE}={text!r}: it must be a number of seconds, 0 or more")
    return max(seconds, _kept_for)


@contextlib.contextmanager
def kept(seconds: float) -> Iterator[None]:
    """Keepers wait for so many seconds for another call, and are ended when the context is left."""
    global _kept_for
    before, _kept_for = _kept_for, seconds
    try:
        yield
    finally:
        _kept_for = before
        if not idle_seconds():
            end_all()


def take(
    env: Mapping[str, str | None] | None, threads: int | None, workers: int
) -> tuple[KeeperHandle, Key]:
    """A keeper on this machine, one that waits if there is a fitting one.

    Args:
        env: variables to set, or with None to remove, besides those of this process.
        threads: CPU threads a worker; None: the cores divided among `workers`.
        workers: how many there will be.

    Raises:
        UserError: ALLHANDS_KEEPER_IDLE is no number of seconds.
    """
    variables = {
        name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None
    }
    # With threads, or OMP_NUM_THREADS, it does not matter how many workers the cores are divided
    # among.
    shared = workers if threads is None and "OMP_NUM_THREADS" not in variables else None
    key = Key(
        os.getpid(),
        threads,
        shared,
        frozenset((name, value) for name, value in variables.items() if name not in _CHANGING),
    )
    if idle_seconds():
        with _lock:
            keeper, since = _waiting.pop(key, (None, 0.0))
        if keeper is not None:
            if (
                keeper.process.poll() is None
                and time.monotonic() < since + idle_seconds() - _MARGIN
            ):
                keeper.ready = None
                return keeper, key
            keeper.close()
    return start_keeper(env), key


def changed() -> dict[str, str | None]:
    """Variables that a keeper which waited has to set, or with None to remove."""
    return {name: os.environ.get(name) for name in _CHANGING}


def put_back(keeper: KeeperHandle, key: Key) -> bool:
    """Let a keeper whose round is over wait for the next call; False when it cannot, and is to be
    ended."""
    if not idle_seconds() or not keeper.idle or keeper.lost or keeper.process.poll() is not None:
        return False
    with _lock:
        other, _ = _waiting.pop(key, (None, 0.0))
        _waiting[key] = (keeper, time.monotonic())
    if other is not None:
        other.close()
    return True


def end_all() -> None:
    """End all keepers that wait."""
    with _lock:
        keepers = [keeper for keeper, _ in _waiting.values()]
        _waiting.clear()
    for keeper in keepers:
        keeper.close()


# They would end with this process anyhow, but later than it.
atexit.register(end_all)
