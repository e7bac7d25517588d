"""Rows gathered, dealt out and sent; names and arguments are as in `reductions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from allhands.horovod import engine
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.reduce_ops import Average, checked
from allhands.horovod.torch.compression import Compression
from allhands.horovod.torch.pending import AsyncResult, only, same, waited
from allhands.horovod.torch.reductions import allreduce_async, grouped_allreduce_async

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

Tensors = Sequence[torch.Tensor]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AsyncResult:
    """Begin to put all ranks' rows of each tensor together, all or nothing; see `allgather`."""
    return AsyncResult(
        engine.current().allgather(tensors, name=name, process_set=process_set), same
    )


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AsyncResult:
    """Begin to put all ranks' rows together; see `allgather`."""
    return AsyncResult(
        engine.current().allgather([tensor], name=name, process_set=process_set), only
    )


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """All ranks' rows, in the order of the ranks. The first dimension may differ between ranks, the
    others may not.

    Its gradient is the rows of the averaged gradient that came from this rank.
    """
    (result,) = _Allgather.apply((name, process_set), tensor)
    return result


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """`allgather` of several tensors, all or nothing."""
    return list(_Allgather.apply((name, process_set), *tensors))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, args: tuple[Any, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        pending = grouped_allgather_async(tensors, *args)  # which refuses what has no rows
        ctx.args, ctx.rows = args, [len(tensor) for tensor in tensors]
        return tuple(pending.wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        name, process_set = ctx.args
        name = None if name is None else f"{name}.gradient"
        lengths = (
            engine.current()
            .allgather([torch.tensor([ctx.rows])], process_set=process_set)
            .wait()[0]
        )
        whole = [grad.contiguous() for grad in grads]
        averaged = grouped_allreduce_async(
            whole, None, name, Average, process_set=process_set
        ).wait()
        firsts = lengths[: process_set.rank()].sum(0).tolist()
        slices = zip(averaged, firsts, ctx.rows, strict=True)
        return (None, *(grad[first : first + rows] for grad, first, rows in slices))


# ------------------------------------------------------------------ broadcast


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> AsyncResult:
    """Begin to give all ranks rank `root_rank`'s tensor; see `broadcast`."""
    return AsyncResult(
        engine.current().broadcast([tensor], root_rank, name=name, process_set=process_set), only
    )


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> AsyncResult:
    """Begin to overwrite the tensor with rank `root_rank`'s; see `broadcast`."""
    handle = engine.current().broadcast(
        [tensor], root_rank, name=name, process_set=process_set, outputs=[tensor]
    )
    return AsyncResult(handle, lambda _: tensor)


broadcast_ = waited("broadcast_", broadcast_async_)
"""Overwrite the tensor with rank `root_rank`'s; see `broadcast`."""


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Rank `root_rank`'s tensor, as a new one. The rank is counted in the whole world, also in a
    process set.

    Its gradient is, as in Horovod, the averaged gradient on the root, and 0 elsewhere.
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.args = (root_rank, name, process_set)
        result: torch.Tensor = broadcast_async(tensor, root_rank, name, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        root_rank, name, process_set = ctx.args
        name = None if name is None else f"{name}.gradient"
        averaged = allreduce_async(
            grads[0].contiguous(), None, name, Average, process_set=process_set
        ).wait()
        own = averaged if engine.current().world.rank == root_rank else torch.zeros_like(averaged)
        return own, None, None, None


# ------------------------------------------------------------------ alltoall, reducescatter


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> AsyncResult:
    """Begin to deal the tensor's rows out; see `alltoall`."""
    handle = engine.current().alltoall(tensor, splits, name=name, process_set=process_set)
    return AsyncResult(handle, same if splits is not None else _first)


def _first(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return pair[0]


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The rows that each rank has for this one, in the order of the ranks.

    Args:
        tensor: its rows go to the ranks in turn.
        splits: how many rows go to each rank, a list or a tensor of whole numbers; None deals them
            evenly.
        name, process_set: see the module.

    Returns:
        The tensor; with `splits`, also how many of its rows came from each rank (int32).
    """
    received, counts = _Alltoall.apply(tensor, splits, name, process_set)
    return received if splits is None else (received, counts)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        received, counts = (
            engine.current().alltoall(tensor, splits, name=name, process_set=process_set).wait()
        )
        ctx.args = (counts, name, process_set)
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        counts, name, process_set = ctx.args
        name = None if name is None else f"{name}.gradient"
        back, _ = (
            engine.current()
            .alltoall(grads[0].contiguous(), counts, name=name, process_set=process_set)
            .wait()
        )
        return back, None, None, None


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AsyncResult:
    """Begin to reduce tensors and deal their rows out, all or nothing; see `reducescatter`."""
    handle = engine.current().reducescatter(
        tensors,
        name=name,
        op=checked(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return AsyncResult(handle, same)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AsyncResult:
    """Begin to reduce a tensor and deal its rows out; see `reducescatter`."""
    begun = grouped_reducescatter_async(
        [tensor], name, op, process_set, prescale_factor, postscale_factor
    )
    return AsyncResult(begun.handle, only)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the tensor that is reduced over the ranks (`Average` or `Sum`).

    The first ranks get one row more where they do not divide evenly. Its gradient is, as in
    Horovod, the ranks' gradients put together, with `Sum` times the number of ranks.
    """
    (result,) = grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return result


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors, all or nothing."""
    narrow = [compression.compress(tensor) for tensor in tensors]
    args = (name, checked(op), process_set, prescale_factor, postscale_factor)
    results = _Reducescatter.apply(args, *(tensor for tensor, _ in narrow))
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, narrow, strict=True)
    ]


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, args: tuple[Any, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.args = args
        return tuple(grouped_reducescatter_async(tensors, *args).wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        name, op, process_set, pre, post = ctx.args
        factor = pre * post * (1 if op is Average else process_set.size())
        name = None if name is None else f"{name}.gradient"
        whole = grouped_allgather_async(
            [grad.contiguous() for grad in grads], name, process_set
        ).wait()
        return (None, *(grad * factor for grad in whole))
