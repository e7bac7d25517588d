"""Collective operations on torch tensors.

Those that end in ``_async`` return a handle for `poll` and `synchronize`; those with ``_`` in the end write into their argument.
`name` is what matches an operation over the ranks; without one, the order of the calls of its kind does. `process_set` limits it
to some ranks. What all ranks must give the same and do not is a `HorovodInternalError` on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from allhands.errors import UserError
from allhands.horovod import engine
from allhands.horovod.handles import Handle
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.reduce_ops import Average, ReduceOp, checked
from allhands.horovod.torch.compression import Compression

Tensors = Sequence[torch.Tensor]


class Pending:
    """What the ``_async`` functions return: an engine's handle and what its result becomes."""

    def __init__(self, handle: Handle, finish: Callable[[Any], Any]) -> None:
        self.handle, self._finish = handle, finish

    def wait(self) -> Any:
        """The operation's result; see `synchronize`."""
        return self._finish(self.handle.wait())


def poll(handle: Pending) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.handle.done()


def synchronize(handle: Pending) -> Any:
    """Wait for an operation that was begun, and return its result.

    Raises:
        HorovodInternalError: it failed; the message names the tensor, the ranks and what each of them gave.
    """
    return handle.wait()


def _only(values: list[torch.Tensor]) -> torch.Tensor:
    return values[0]


def _same(values: Any) -> Any:
    return values


# ------------------------------------------------------------------ allreduce


def grouped_allreduce_async(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: Any = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Pending:  # fmt: skip
    """Begin to reduce tensors over the ranks, all or nothing; see `allreduce`."""
    return Pending(_reduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set, None), _same)


def grouped_allreduce_async_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: Any = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Pending:  # fmt: skip
    """Begin to reduce tensors over the ranks in place, all or nothing; see `allreduce`."""
    handle = _reduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set, tensors)
    return Pending(handle, lambda _: list(tensors))


def _reduce(
    tensors: Tensors, average: bool | None, name: str | None, op: Any, pre: float, post: float, process_set: ProcessSet,
    outputs: Tensors | None,
) -> Handle:  # fmt: skip
    return engine.current().allreduce(
        tensors, name=name, op=checked(op, average), prescale_factor=pre, postscale_factor=post, process_set=process_set,
        outputs=outputs,
    )  # fmt: skip


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Any = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Pending:  # fmt: skip
    """Begin to reduce a tensor over the ranks; see `allreduce`."""
    return Pending(_reduce([tensor], average, name, op, prescale_factor, postscale_factor, process_set, None), _only)


def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Any = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Pending:  # fmt: skip
    """Begin to reduce a tensor over the ranks in place; see `allreduce`."""
    handle = _reduce([tensor], average, name, op, prescale_factor, postscale_factor, process_set, [tensor])
    return Pending(handle, lambda _: tensor)


def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Any = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Reduce a tensor over the ranks in place; see `allreduce`."""
    result: torch.Tensor = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()  # fmt: skip
    return result


def grouped_allreduce_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: Any = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:  # fmt: skip
    """Reduce tensors over the ranks in place, all or nothing; see `allreduce`."""
    result: list[torch.Tensor] = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return result


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Reduce a tensor over the ranks.

    Its gradient is reduced by the same operation.

    Args:
        tensor: contiguous, dense, of the same shape and dtype on all ranks. Whole numbers are averaged towards 0.
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
    tensors: Tensors, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:  # fmt: skip
    """Reduce tensors over the ranks, all or nothing; see `allreduce`."""
    narrow = [compression.compress(tensor) for tensor in tensors]
    args = (checked(op, average), name, prescale_factor, postscale_factor, process_set)
    results = _Allreduce.apply(args, *(tensor for tensor, _ in narrow))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, narrow, strict=True)]


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, args: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.args = args
        op, name, pre, post, process_set = args
        return tuple(grouped_allreduce_async(tensors, None, name, op, pre, post, process_set).wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        op, name, pre, post, process_set = ctx.args
        whole = [grad.contiguous() for grad in grads]
        name = None if name is None else f"{name}.gradient"
        return (None, *grouped_allreduce_async(whole, None, name, op, pre, post, process_set).wait())


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Any, process_set: ProcessSet = global_process_set
) -> Pending:  # fmt: skip
    """Begin to add up, or average, a sparse COO tensor over the ranks: all get the rows of all, not coalesced.

    Raises:
        UserError: `op` is neither `Average` nor `Sum`, or the tensor is not sparse.
    """
    chosen = checked(op)
    if chosen not in (Average, ReduceOp.Sum):
        raise UserError(f"a sparse tensor with op {chosen}; set op to hvd.Average or hvd.Sum, or give tensor.to_dense()")
    if tensor.layout is not torch.sparse_coo:
        raise UserError("sparse_allreduce_async: the tensor is dense; call hvd.allreduce_async")
    # Not coalesced: hvd.allreduce of the values would need the same places on all ranks.
    indices, values = tensor._indices().t().contiguous(), tensor._values().contiguous()
    handle = engine.current().allgather([indices, values], name=name, process_set=process_set)

    def finish(parts: list[torch.Tensor]) -> torch.Tensor:
        scaled = parts[1] / process_set.size() if chosen is Average else parts[1]
        return torch.sparse_coo_tensor(parts[0].t(), scaled, tensor.shape, check_invariants=False)

    return Pending(handle, finish)


# ------------------------------------------------------------------ allgather


def grouped_allgather_async(tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set) -> Pending:
    """Begin to put all ranks' rows of each tensor together, all or nothing; see `allgather`."""
    return Pending(engine.current().allgather(tensors, name=name, process_set=process_set), _same)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Pending:
    """Begin to put all ranks' rows together; see `allgather`."""
    return Pending(engine.current().allgather([tensor], name=name, process_set=process_set), _only)


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """All ranks' rows, in the order of the ranks. The first dimension may differ between ranks, the others may not.

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
    def forward(ctx: Any, args: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pending = grouped_allgather_async(tensors, *args)  # which refuses what has no rows
        ctx.args, ctx.rows = args, [len(tensor) for tensor in tensors]
        return tuple(pending.wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        name, process_set = ctx.args
        name = None if name is None else f"{name}.gradient"
        lengths = engine.current().allgather([torch.tensor([ctx.rows])], process_set=process_set).wait()[0]
        whole = [grad.contiguous() for grad in grads]
        averaged = grouped_allreduce_async(whole, None, name, Average, process_set=process_set).wait()
        firsts = lengths[: process_set.rank()].sum(0).tolist()
        slices = zip(averaged, firsts, ctx.rows, strict=True)
        return (None, *(grad[first : first + rows] for grad, first, rows in slices))


# ------------------------------------------------------------------ broadcast


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Begin to give all ranks rank `root_rank`'s tensor; see `broadcast`."""
    return Pending(engine.current().broadcast([tensor], root_rank, name=name, process_set=process_set), _only)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Begin to overwrite the tensor with rank `root_rank`'s; see `broadcast`."""
    handle = engine.current().broadcast([tensor], root_rank, name=name, process_set=process_set, outputs=[tensor])
    return Pending(handle, lambda _: tensor)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite the tensor with rank `root_rank`'s; see `broadcast`."""
    result: torch.Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return result


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Rank `root_rank`'s tensor, as a new one. The rank is counted in the whole world, also in a process set.

    Its gradient is, as in Horovod, the averaged gradient on the root, and 0 elsewhere.
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:  # fmt: skip
        ctx.args = (root_rank, name, process_set)
        result: torch.Tensor = broadcast_async(tensor, root_rank, name, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        root_rank, name, process_set = ctx.args
        name = None if name is None else f"{name}.gradient"
        averaged = allreduce_async(grads[0].contiguous(), None, name, Average, process_set=process_set).wait()
        own = averaged if engine.current().world.rank == root_rank else torch.zeros_like(averaged)
        return own, None, None, None


# ------------------------------------------------------------------ alltoall, reducescatter


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Begin to deal the tensor's rows out; see `alltoall`."""
    handle = engine.current().alltoall(tensor, splits, name=name, process_set=process_set)
    return Pending(handle, _same if splits is not None else _first)


def _first(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return pair[0]


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The rows that each rank has for this one, in the order of the ranks.

    Args:
        tensor: its rows go to the ranks in turn.
        splits: how many rows go to each rank, a list or a tensor of whole numbers; None deals them evenly.
        name, process_set: see the module.

    Returns:
        The tensor; with `splits`, also how many of its rows came from each rank (int32).
    """
    received, counts = _Alltoall.apply(tensor, splits, name, process_set)
    return received if splits is None else (received, counts)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        received, counts = engine.current().alltoall(tensor, splits, name=name, process_set=process_set).wait()
        ctx.args = (counts, name, process_set)
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        counts, name, process_set = ctx.args
        name = None if name is None else f"{name}.gradient"
        back, _ = engine.current().alltoall(grads[0].contiguous(), counts, name=name, process_set=process_set).wait()
        return back, None, None, None


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: Any = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Pending:  # fmt: skip
    """Begin to reduce tensors and deal their rows out, all or nothing; see `reducescatter`."""
    handle = engine.current().reducescatter(
        tensors, name=name, op=checked(op), prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        process_set=process_set,
    )  # fmt: skip
    return Pending(handle, _same)


def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: Any = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Pending:  # fmt: skip
    """Begin to reduce a tensor and deal its rows out; see `reducescatter`."""
    begun = grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor)
    return Pending(begun.handle, _only)


def reducescatter(
    tensor: torch.Tensor, name: str | None = None, compression: Any = Compression.none, op: Any = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """This rank's rows of the tensor that is reduced over the ranks (`Average` or `Sum`).

    The first ranks get one row more where they do not divide evenly. Its gradient is the ranks' gradients, put together and
    scaled in the same way.
    """
    (result,) = grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)
    return result


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, compression: Any = Compression.none, op: Any = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[torch.Tensor]:  # fmt: skip
    """`reducescatter` of several tensors, all or nothing."""
    narrow = [compression.compress(tensor) for tensor in tensors]
    args = (name, checked(op), process_set, prescale_factor, postscale_factor)
    results = _Reducescatter.apply(args, *(tensor for tensor, _ in narrow))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, narrow, strict=True)]


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, args: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.args = args
        return tuple(grouped_reducescatter_async(tensors, *args).wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        name, op, process_set, pre, post = ctx.args
        factor = pre * post / (process_set.size() if op is Average else 1)
        name = None if name is None else f"{name}.gradient"
        whole = grouped_allgather_async([grad.contiguous() for grad in grads], name, process_set).wait()
        return (None, *(grad * factor for grad in whole))


# ------------------------------------------------------------------ join, barrier


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
