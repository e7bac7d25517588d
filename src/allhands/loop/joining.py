"""How a process comes to be among the members of its world, and which errors tell that one is
gone."""

from __future__ import annotations

import faulthandler
import sys
from typing import NoReturn

from allhands.errors import WorldError
from allhands.launch import worker
from allhands.loop import admission
from allhands.loop.admission import Terms
from allhands.world.failure_monitor import leave, print_error
from allhands.world.membership import SupersededError
from allhands.world.regroup import Regrouping, began_with

# What PyTorch's errors say where a connection has ended, or a group was aborted.
_SIGNS = ("gloo", "NCCL", "nccl", "onnection", "peer", "aborted", "ProcessGroup", "process group")

_regrouping: Regrouping | None = None


def in_elastic_job() -> bool:
    """Whether this process is a worker of a job whose members may change."""
    return began_with() is not None and worker.active()


def ends_with_a_worker(why: str) -> str:
    """The line for a training of an elastic job that a lost worker ends, and why, as a sentence."""
    return f"note: a lost worker ends this training in spite of --elastic: {why}"


def regrouping_of(own: Terms) -> Regrouping | None:
    """The memberships of this process's world; None where its members never change. A process that
    was started in the place of a lost one waits until it is taken in.

    To be called on every rank once a training begins.

    Args:
        own: what a worker that joins must have in common with the others, as this process has it.

    Raises:
        WorldError: this process does not fit those that it is to join.
    """
    global _regrouping
    if not in_elastic_job():
        return None
    if _regrouping is None:
        _regrouping = Regrouping(_drop_out)
        if _regrouping.outside:
            admission.check(_regrouping, own)
            _join(_regrouping)
        else:
            _regrouping.watch()
    admission.tell(_regrouping, own)
    return _regrouping


def _join(regrouping: Regrouping) -> None:
    worker.ask_to_join()
    while True:
        membership = regrouping.newest(float("inf"))
        assert membership is not None
        try:
            regrouping.enter(membership)
        except (RuntimeError, WorldError) as error:
            if not is_loss(error, regrouping):
                raise
            regrouping.outside = True
        else:
            regrouping.joined = True
            return


def _drop_out(why: str) -> NoReturn:
    """End this process from a thread, as a worker that is lost to the others."""
    print_error(f"allhands: {why}; this process ends. Its threads are here:")
    faulthandler.dump_traceback(sys.__stderr__ or 2)
    leave()


def is_loss(error: BaseException, regrouping: Regrouping) -> bool:
    """Whether an error may be that some rank is gone, or come of what an aborted group gave."""
    if regrouping.aborted and isinstance(error, Exception):
        return True
    if not isinstance(error, (RuntimeError, WorldError)):
        return False
    causes: list[BaseException | None] = [error]
    while causes[-1] is not None:  # a pipeline's schedule tells of one in words of its own
        causes.append(causes[-1].__cause__)
    said = " ".join(map(str, causes))
    # Workers that wait to join are no reason for an error, and come in between two steps alone.
    return (
        isinstance(error, SupersededError)
        or any(sign in said for sign in _SIGNS)
        or regrouping.has_lost()
    )
