"""Agents that wait for the next call: with ALLHANDS_AGENT_IDLE=60, a `spawn` within a minute of
the last one starts at once.

Most of the time in which workers start goes into importing torch. An agent whose round is over has
done that already, and is otherwise as clean as a new one: user code runs only in the workers that
it forks. It is used again by the same process with the same variables, and ends by itself when it
is not, and with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from allhands.errors import UserError, warn_renamed
from allhands.launch.handle import AgentHandle
from allhands.launch.local import start_agent

VARIABLE = "ALLHANDS_AGENT_IDLE"
_OLD_VARIABLE = "ALLHANDS_KEEPER_IDLE"
# An agent that is about to end is not taken.
_MARGIN = 2.0
# These change in a process that goes on, and mean nothing to one that starts; workers get their
# present values. PyTorch's compiler sets the second one when it is imported.
_CHANGING = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class Key:
    """What two calls must have in common to share an agent: it fixed all that when it started."""

    process: int
    threads: int | None
    workers: int | None
    variables: frozenset[tuple[str, str]]


_waiting: dict[Key, tuple[AgentHandle, float]] = {}
_lock = threading.Lock()
_kept_for = 0.0


def idle_seconds() -> float:
    """For how long an agent waits for another call; 0, the default, ends it with the first one."""
    if _OLD_VARIABLE in os.environ and VARIABLE not in os.environ:
        warn_renamed(_OLD_VARIABLE, VARIABLE)
    text = os.environ.get(VARIABLE, os.environ.get(_OLD_VARIABLE, "")).strip()
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 10**6:
        raise UserError(f"{VARIABLE}={text!r}: it must be a number of seconds, 0 or more")
    return max(seconds, _kept_for)


@contextlib.contextmanager
def kept(seconds: float) -> Iterator[None]:
    """Agents wait for so many seconds for another call, and are ended when the context is left."""
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
) -> tuple[AgentHandle, Key]:
    """An agent on this machine, one that waits if there is a fitting one.

    Args:
        env: variables to set, or with None to remove, besides those of this process.
        threads: CPU threads a worker; None: the cores divided among `workers`.
        workers: how many there will be.

    Raises:
        UserError: ALLHANDS_AGENT_IDLE is no number of seconds.
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
            agent, since = _waiting.pop(key, (None, 0.0))
        if agent is not None:
            if agent.process.poll() is None and time.monotonic() < since + idle_seconds() - _MARGIN:
                agent.ready = None
                return agent, key
            agent.close()
    return start_agent(env), key


def changed() -> dict[str, str | None]:
    """Variables that an agent which waited has to set, or with None to remove."""
    return {name: os.environ.get(name) for name in _CHANGING}


def put_back(agent: AgentHandle, key: Key) -> bool:
    """Let an agent whose round is over wait for the next call; False when it cannot, and is to be
    ended."""
    if not idle_seconds() or not agent.idle or agent.lost or agent.process.poll() is not None:
        return False
    with _lock:
        other, _ = _waiting.pop(key, (None, 0.0))
        _waiting[key] = (agent, time.monotonic())
    if other is not None:
        other.close()
    return True


def end_all() -> None:
    with _lock:
        agents = [agent for agent, _ in _waiting.values()]
        _waiting.clear()
    for agent in agents:
        agent.close()


# They would end with this process anyhow, but later than it.
atexit.register(end_all)
