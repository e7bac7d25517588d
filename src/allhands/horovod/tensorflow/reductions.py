"""Horovod's reductions and gathers of TensorFlow tensors, eager and inside ``tf.function``. The
gradients of each are made of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from allhands.errors import UserError
from allhands.horovod import engine, reduce_ops
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.reduce_ops import ReduceOp
from allhands.horovod.tensorflow.bridge import (
    as_written,
    check_device,
    derived,
    differentiable,
    exchange,
)
from allhands.horovod.tensorflow.compression import Compression

_DIFFERENTIABLE = {reduce_ops.Average, reduce_ops.Sum}


@as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor of one shape over the ranks: ``postscale * reduce(prescale * tensor)``.

    ``tf.IndexedSlices`` are gathered (all ranks' rows, divided by the number of ranks for Average),
    not added up.

    Args:
        tensor: a tensor, a variable or ``tf.IndexedSlices``.
        average: Horovod's old way to write `op`.
        device_dense, device_sparse: accepted when empty or a CPU: tensors are exchanged through the
            memory of the host.
        compression: `Compression.none`, ``fp16``, ``bf16``, or a class with ``compress`` and
            ``decompress``.
        op: Average (also when None), Sum, Min, Max, Product, Adasum.
        prescale_factor, postscale_factor: multiply before and after.
        name: by which the ranks match calls. None: the place in the graph; in eager mode the count
            of unnamed calls.
        process_set: the ranks that take part.
        ignore_name_scope: leave TensorFlow's name scopes out of the name.

    Returns:
        A tensor of the same shape and dtype, or ``tf.IndexedSlices``.

    Raises:
        UserError: an argument or dtype cannot be honoured.
        HorovodInternalError: the ranks passed different shapes, dtypes or operations, or one did
            not call.
    """
    return grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name,
        kind="allreduce",
    )[0]


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    *,
    tensor_names: Sequence[str] | None = None,
    batches: Sequence[Sequence[int]] | None = None,
    kind: str = "grouped_allreduce",
) -> list[Any]:
    """`allreduce` of several tensors in one exchange, fused into one message a dtype. It begins
    when all ranks have all of them.

    `tensor_names` are what the tensors are called in messages. `batches` cut the exchange into
    several, each of which begins when all ranks have its tensors; ``tf.IndexedSlices`` are an
    exchange of their own.
    """
    if not tensors:
        return []
    check_device("device_dense", device_dense)
    check_device("device_sparse", device_sparse)
    reduction = reduce_ops.checked(op, average)
    dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    sparse = [i for i in range(len(tensors)) if i not in dense]
    results: list[Any] = [None] * len(tensors)
    names = list(tensor_names) if tensor_names is not None else None
    if dense:
        packed = [compression.compress(tf.convert_to_tensor(tensors[i])) for i in dense]
        reduced = _reduce(
            [tensor for tensor, _ in packed],
            kind=kind,
            name=name,
            tensor_names=None if names is None else [names[i] for i in dense],
            batches=None if batches is None else _among(dense, batches),
            op=reduction,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            ignore_name_scope=ignore_name_scope,
        )
        for i, result, (_, ctx) in zip(dense, reduced, packed, strict=True):
            results[i] = compression.decompress(result, ctx)
    if sparse:
        scaled = (prescale_factor, postscale_factor) != (1.0, 1.0)
        slices = _reduced_slices(
            [tensors[i] for i in sparse], reduction, scaled, process_set, ignore_name_scope, name
        )
        for i, result in zip(sparse, slices, strict=True):
            results[i] = result
    return results


def _reduce(
    tensors: list[Any],
    *,
    kind: str,
    name: str | None,
    tensor_names: list[str] | None,
    batches: list[list[int]] | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> list[Any]:
    def submit(
        parts: list[torch.Tensor], key: str | None, batch: Sequence[int] = range(len(tensors))
    ) -> Any:
        return engine.current().allreduce(
            parts,
            name=key,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            tensor_names=() if tensor_names is None else [tensor_names[i] for i in batch],
        )

    def forward(*parts: Any) -> list[Any]:
        return exchange(
            submit,
            parts,
            kind=kind,
            name=name,
            shapes=[part.shape for part in parts],
            reduces=True,
            ignore_name_scope=ignore_name_scope,
            batches=batches,
        )

    def backward(*upstream: Any) -> list[Any]:
        if op not in _DIFFERENTIABLE:
            raise UserError(
                f"{kind} with op={op} has no gradient; stop it with tf.stop_gradient, or use "
                "op=Average or op=Sum"
            )
        return _reduce(
            list(upstream),
            kind=f"{kind}.gradient",
            name=derived(name, "gradient"),
            tensor_names=tensor_names,
            batches=batches,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            ignore_name_scope=ignore_name_scope,
        )

    return differentiable(tensors, forward, backward)


def _among(kept: list[int], batches: Sequence[Sequence[int]]) -> list[list[int]]:
    """The batches of those that are kept, by their places among them."""
    place = {i: number for number, i in enumerate(kept)}
    cut = [[place[i] for i in batch if i in place] for batch in batches]
    return [batch for batch in cut if batch]


def _reduced_slices(
    slices: list[Any],
    op: ReduceOp,
    scaled: bool,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    name: str | None,
) -> list[Any]:
    """All ranks' rows, with values divided by the number of ranks for Average."""
    if op not in _DIFFERENTIABLE:
        raise UserError(
            f"op={op} is not defined on tf.IndexedSlices: use op=Average or op=Sum, or set "
            "sparse_as_dense=True"
        )
    if scaled:
        raise UserError(
            "prescale_factor, postscale_factor and gradient_predivide_factor are not defined on "
            "tf.IndexedSlices: leave them at 1.0, or set sparse_as_dense=True"
        )
    rows = [part for each in slices for part in (each.values, each.indices)]
    gathered = grouped_allgather(rows, derived(name, "slices"), ignore_name_scope, process_set)
    size = process_set.size() if op == reduce_ops.Average else 1
    return [
        tf.IndexedSlices(
            values / tf.cast(size, values.dtype) if size != 1 else values, indices, each.dense_shape
        )
        for each, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True)
    ]


@as_written
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """All ranks' tensors, one after another along the first dimension, which may differ between
    ranks.

    The gradient is Horovod's: the average over the ranks of the gradients, and of it the rows that
    this rank gave.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set, kind="allgather")[0]


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    kind: str = "grouped_allgather",
) -> list[Any]:
    """`allgather` of several tensors in one exchange."""
    if not tensors:
        return []
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if any(tensor.shape.rank == 0 for tensor in tensors):
        raise UserError(f"{kind}: a scalar has no first dimension; write tf.reshape(tensor, [1])")
    counts = [tf.shape(tensor)[0] for tensor in tensors]

    def submit(parts: list[torch.Tensor], key: str | None) -> Any:
        return engine.current().allgather(parts, name=key, process_set=process_set)

    def forward(*parts: Any) -> list[Any]:
        shapes = [tf.TensorShape([None]).concatenate(part.shape[1:]) for part in parts]
        return exchange(
            submit, parts, kind=kind, name=name, shapes=shapes, ignore_name_scope=ignore_name_scope
        )

    def backward(*upstream: Any) -> list[Any]:
        options: dict[str, Any] = {
            "process_set": process_set,
            "ignore_name_scope": ignore_name_scope,
        }
        means = grouped_allreduce(
            upstream, op=reduce_ops.Average, name=derived(name, "gradient"), **options
        )
        every = allgather(tf.stack(counts)[tf.newaxis], name=derived(name, "counts"), **options)
        mine = process_set.rank()
        starts = tf.reduce_sum(every[:mine], axis=0)
        return [mean[starts[i] : starts[i] + every[mine, i]] for i, mean in enumerate(means)]

    return differentiable(tensors, forward, backward)


@as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = reduce_ops.Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks (Average or Sum) and keep this rank's share of its rows; the
    first ranks get one row more.

    The gradient is Horovod's: all ranks' gradients one after another, times the number of ranks for
    Sum.
    """
    return grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        name,
        ignore_name_scope,
        kind="reducescatter",
    )[0]


@as_written
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = reduce_ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
    *,
    kind: str = "grouped_reducescatter",
) -> list[Any]:
    """`reducescatter` of several tensors in one exchange."""
    if not tensors:
        return []
    check_device("device_dense", device_dense)
    reduction = reduce_ops.checked(op)

    def submit(parts: list[torch.Tensor], key: str | None) -> Any:
        return engine.current().reducescatter(
            parts,
            name=key,
            op=reduction,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )

    def forward(*parts: Any) -> list[Any]:
        shapes = [tf.TensorShape([None]).concatenate(part.shape[1:]) for part in parts]
        return exchange(
            submit,
            parts,
            kind=kind,
            name=name,
            shapes=shapes,
            reduces=True,
            ignore_name_scope=ignore_name_scope,
        )

    def backward(*upstream: Any) -> list[Any]:
        factor = (
            prescale_factor
            * postscale_factor
            * (process_set.size() if reduction == reduce_ops.Sum else 1)
        )
        scaled = [part * tf.cast(factor, part.dtype) for part in upstream]
        return grouped_allgather(scaled, derived(name, "gradient"), ignore_name_scope, process_set)

    packed = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    reduced = differentiable([tensor for tensor, _ in packed], forward, backward)
    return [
        compression.decompress(result, ctx)
        for result, (_, ctx) in zip(reduced, packed, strict=True)
    ]
