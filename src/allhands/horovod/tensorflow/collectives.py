"""Horovod's collectives that reduce nothing, on TensorFlow tensors, eager and inside
``tf.function``. Those of tensors are differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from allhands.errors import UserError
from allhands.horovod import basics, engine, reduce_ops
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.tensorflow.bridge import as_written, derived, differentiable, exchange
from allhands.horovod.tensorflow.queries import number_from
from allhands.horovod.tensorflow.reductions import allreduce


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensor of global rank `root_rank`, on every rank. The gradient is Horovod's: on the root
    the average, elsewhere 0."""

    def forward(part: Any) -> list[Any]:
        return broadcast_all(
            [part],
            root_rank,
            name=name,
            ignore_name_scope=ignore_name_scope,
            process_set=process_set,
        )

    def backward(upstream: Any) -> list[Any]:
        mean = allreduce(
            upstream,
            op=reduce_ops.Average,
            name=derived(name, "gradient"),
            process_set=process_set,
            ignore_name_scope=ignore_name_scope,
        )
        return [mean if basics.rank() == root_rank else tf.zeros_like(mean)]

    return differentiable([tf.convert_to_tensor(tensor)], forward, backward)[0]


def broadcast_all(
    tensors: Sequence[Any],
    root_rank: int,
    *,
    name: str | None = None,
    tensor_names: list[str] | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    kind: str = "broadcast",
) -> list[Any]:
    """`broadcast` of several tensors in one exchange, without a gradient."""

    def submit(parts: list[torch.Tensor], key: str | None) -> Any:
        return engine.current().broadcast(
            parts, root_rank, name=key, process_set=process_set, tensor_names=tensor_names or ()
        )

    shapes = [tensor.shape for tensor in tensors]
    return exchange(
        submit, tensors, kind=kind, name=name, shapes=shapes, ignore_name_scope=ignore_name_scope
    )


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Deal the rows of a tensor out to the ranks, and get theirs.

    Args:
        tensor: at least one dimension; the other dimensions must be the same on all ranks.
        splits: integers, one a rank: how many rows go to it. None: the same number to each.

    Returns:
        The rows received, in the order of the ranks; with `splits` also how many came from each
        rank, int32.
    """
    tensor = tf.convert_to_tensor(tensor)
    parts = (
        [tensor] if splits is None else [tensor, tf.cast(tf.convert_to_tensor(splits), tf.int32)]
    )
    shape = tf.TensorShape([None]).concatenate(tensor.shape[1:])

    def submit(given: list[torch.Tensor], key: str | None) -> Any:
        chosen = given[1] if len(given) > 1 else None
        return engine.current().alltoall(given[0], chosen, name=key, process_set=process_set)

    def forward(*given: Any) -> list[Any]:
        return exchange(
            submit,
            given,
            kind="alltoall",
            name=name,
            shapes=[shape, [None]],
            dtypes=[tensor.dtype, tf.int32],
            ignore_name_scope=ignore_name_scope,
        )

    def backward(results: list[Any], upstream: Any, *_: Any) -> list[Any]:
        back, _counts = alltoall(
            upstream, results[1], derived(name, "gradient"), ignore_name_scope, process_set
        )
        return [back, *[None] * (len(parts) - 1)]

    received, counts = differentiable(parts, forward, backward, with_results=True)
    return received if splits is None else (received, counts)


@as_written
def join() -> Any:
    """Say that this rank has no more data, and wait until every rank has. Meanwhile it gives zeros
    to the others' reductions.

    Returns:
        The rank that came last, an int32 scalar.
    """
    return number_from(lambda: engine.current().join())


@as_written
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set is here. Eager mode only."""
    if not tf.executing_eagerly():
        raise UserError(
            "barrier() inside tf.function would run once, when it is traced: call it outside"
        )
    engine.current().barrier(process_set)
