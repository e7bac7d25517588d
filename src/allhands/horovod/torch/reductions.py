"""Tensors reduced over the ranks.

Operations that end in ``_async`` return a handle for `poll` and `synchronize`; those with ``_`` in
the end write into their argument. `name` is what matches an operation over the ranks; without one,
the order of the calls of its kind does. `process_set` limits it to some ranks. What all ranks must
give the same and do not is a `HorovodInternalError` on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from allhands.errors import UserError
from allhands.horovod import engine
from allhands.horovod.handles import Handle
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.reduce_ops import Average, ReduceOp, checked
from allhands.horovod.torch.compression import Compression
from allhands.horovod.torch.pending import AsyncResult, only, same, waited

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "sparse_allreduce_async",
]

Tensors = Sequence[torch.Tensor]


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AsyncResult:
    """Begin to reduce tensors over the ranks, all or nothing; see `allreduce`."""
    handle = _reduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return AsyncResult(handle, same)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AsyncResult:
    """Begin to reduce tensors over the ranks in place, all or nothing; see `allreduce`."""
    handle = _reduce(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set, tensors
    )
    return AsyncResult(handle, lambda _: list(tensors))


def _reduce(
    tensors: Tensors,
    average: bool | None,
    name: str | None,
    op: Any,
    pre: float,
    post: float,
    process_set: ProcessSet,
    outputs: Tensors | None = None,
) -> Handle:
    return engine.current().allreduce(
        tensors,
        name=name,
        op=checked(op, average),
        prescale_factor=pre,
        postscale_factor=post,
        process_set=process_set,
        outputs=outputs,
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AsyncResult:
    """Begin to reduce a tensor over the ranks; see `allreduce`."""
    handle = _reduce([tensor], average, name, op, prescale_factor, postscale_factor, process_set)
    return AsyncResult(handle, only)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AsyncResult:
    """Begin to reduce a tensor over the ranks in place; see `allreduce`."""
    handle = _reduce(
        [tensor], average, name, op, prescale_factor, postscale_factor, process_set, [tensor]
    )
    return AsyncResult(handle, lambda _: tensor)


allreduce_ = waited("allreduce_", allreduce_async_)
"""Reduce a tensor over the ranks in place; see `allreduce`."""

grouped_allreduce_ = waited("grouped_allreduce_", grouped_allreduce_async_)
"""Reduce tensors over the ranks in place, all or nothing; see `allreduce`."""


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks.

    Its gradient is reduced by the same operation.

    Args:
        tensor: contiguous, dense, of the same shape and dtype on all ranks. Whole numbers are
            averaged towards 0.
        average: Horovod's old form of `op`.
        name: see the module.
        compression: one of `Compression`.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product`, `Adasum`, or `ActiveAverage`.
        prescale_factor, postscale_factor: what it is multiplied by before and after it.
        process_set: the ranks.

    Returns:
        A new tensor.

    Raises:
        UserError: an argument cannot be honoured.
        HorovodInternalError: the ranks do not agree, or one of them did not come.
    """
    narrow, context = compression.compress(tensor)
    args = (checked(op, average), name, prescale_factor, postscale_factor, process_set)
    (result,) = _Allreduce.apply(args, narrow)
    return compression.decompress(result, context)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce tensors over the ranks, all or nothing; see `allreduce`."""
    narrow = [compression.compress(tensor) for tensor in tensors]
    args = (checked(op, average), name, prescale_factor, postscale_factor, process_set)
    results = _Allreduce.apply(args, *(tensor for tensor, _ in narrow))
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, narrow, strict=True)
    ]


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, args: tuple[Any, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.args = args
        op, name, pre, post, process_set = args
        return tuple(
            grouped_allreduce_async(tensors, None, name, op, pre, post, process_set).wait()
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        op, name, pre, post, process_set = ctx.args
        whole = [grad.contiguous() for grad in grads]
        name = None if name is None else f"{name}.gradient"
        return (
            None,
            *grouped_allreduce_async(whole, None, name, op, pre, post, process_set).wait(),
        )


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Any, process_set: ProcessSet = global_process_set
) -> AsyncResult:
    """Begin to add up, or average, a sparse COO tensor over the ranks: all get the rows of all, not
    coalesced.

    Raises:
        UserError: `op` is neither `Average` nor `Sum`, or the tensor is not sparse.
    """
    chosen = checked(op)
    if chosen not in (Average, ReduceOp.Sum):
        raise UserError(
            f"a sparse tensor with op {chosen}; set op to hvd.Average or hvd.Sum, or give "
            "tensor.to_dense()"
        )
    if tensor.layout is not torch.sparse_coo:
        raise UserError("sparse_allreduce_async: the tensor is dense; call hvd.allreduce_async")
    # Not coalesced: hvd.allreduce of the values would need the same places on all ranks.
    indices, values = tensor._indices().t().contiguous(), tensor._values().contiguous()
    handle = engine.current().allgather([indices, values], name=name, process_set=process_set)

    def finish(parts: list[torch.Tensor]) -> torch.Tensor:
        scaled = parts[1] / process_set.size() if chosen is Average else parts[1]
        return torch.sparse_coo_tensor(parts[0].t(), scaled, tensor.shape, check_invariants=False)

    return AsyncResult(handle, finish)
