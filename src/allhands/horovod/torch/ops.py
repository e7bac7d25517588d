"""Waiting for the other ranks, without tensors."""

from __future__ import annotations

from allhands.horovod import engine
from allhands.horovod.process_sets import ProcessSet, global_process_set


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all others say so as well.

    Meanwhile it takes part in the others' allreduces with zeros; `Average` still divides by the
    number of all ranks, `ActiveAverage` by that of those that have not joined. Other operations
    fail on the ranks that call them.

    Args:
        device: what Horovod needs to place the zeros; they are made where they belong.

    Returns:
        The rank that joined last.
    """
    return engine.current().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have come here."""
    engine.current().barrier(process_set)
