"""Signals that reach the process which started the workers.

SIGTERM, and SIGUSR1 or SIGUSR2 where a scheduler is told to send them before it takes the machine
back, ask a training to save and leave. Only the workers can do that, so they must learn of it and
get the time for it. A signal that comes before they can take it is kept, and ends the job: they
have nothing to save yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from allhands.launch.processes import REQUESTS, set_handlers
from allhands.launch.supervisor import Supervisor

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def stop_on_signals(supervisor: Supervisor) -> dict[int, Any]:
    """For a launcher: SIGINT, SIGTERM and SIGHUP stop the job, SIGUSR1 and SIGUSR2 are passed on to
    the workers.

    Returns:
        The handlers that stood before, for `restore_handlers`. Ignored ones (nohup) stay so.
    """

    def on_stop(number: int, _frame: FrameType | None) -> None:
        supervisor.interrupt(number)
        if len(supervisor.signals) > 2:
            # Whoever insists is obeyed even when our own output is stuck; the agent ends the
            # workers.
            os._exit(128 + number)

    def on_request(number: int, _frame: FrameType | None) -> None:
        supervisor.pass_on(number)

    before = set_handlers((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), on_stop)
    return before | set_handlers(PASSED_ON, on_request)


def pass_signals_on(supervisor: Supervisor) -> dict[int, Any]:
    """For a caller's own process: pass SIGTERM, SIGUSR1 and SIGUSR2 on to the workers, where they
    would end this process.

    A signal that the caller handles or ignores is left to that, and so are all of them outside of
    the main thread, in which alone Python can handle signals.

    Returns:
        The handlers that stood before, for `restore_handlers`.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if not supervisor.workers:
            raise SystemExit(128 + number)  # whatever is being prepared, it is not waited for
        supervisor.pass_on(number)

    return set_handlers(REQUESTS, on_signal, of_users=False)


@contextlib.contextmanager
def leaves_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit inside, where it would have ended this process at once and left its
    files behind."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # Python handles signals in the main thread only, and a handler of the user's own stays.
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
