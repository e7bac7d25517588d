"""Collective operations on torch tensors.

Those that end in ``_async`` return a handle for `poll` and `synchronize`; those with ``_`` in the end write into their argument.
`name` is what matches an operation over the ranks; without one, the order of the calls of its kind does. `process_set` limits it
to some ranks. What all ranks must give the same and do not is a `HorovodInternalError` on each of them.
"""

from __future__ import annotations

from allhands.horovod import engine
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.torch.pending import (
    Pending,
    poll,
    synchronize,
)
from allhands.horovod.torch.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from allhands.horovod.torch.rows import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all others say so as well.

    Meanwhile it takes part in the others' allreduces with zeros; `Average` still divides by the number of all ranks,
    `ActiveAverage` by that of those that have not joined. Other operations fail on the ranks that call them.

    Args:
        device: what Horovod needs to place the zeros; they are made where they belong.

    Returns:
        The rank that joined last.
    """
    return engine.current().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have come here."""
    engine.current().barrier(process_set)


__all__ = [
    "Pending", "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
    "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "join", "poll", "reducescatter",
    "reducescatter_async", "sparse_allreduce_async", "synchronize",
]  # fmt: skip
