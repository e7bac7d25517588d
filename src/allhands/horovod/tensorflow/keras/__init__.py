"""Horovod's names for Keras 3 on TensorFlow: ``import allhands.horovod.tensorflow.keras as
hvd``."""

from __future__ import annotations

from typing import Any

from allhands.errors import UserError
from allhands.horovod.tensorflow.requirements import checked_tensorflow

checked_tensorflow()

import tensorflow as tf

from allhands.horovod import basics
from allhands.horovod.basics import *  # noqa: F403
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.reduce_ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from allhands.horovod.tensorflow import collectives, reductions
from allhands.horovod.tensorflow.compression import Compression
from allhands.horovod.tensorflow.gradients import variables_of
from allhands.horovod.tensorflow.keras import callbacks, elastic
from allhands.horovod.tensorflow.keras.optimizer import (
    DistributedOptimizer as _DistributedOptimizer,
)
from allhands.horovod.tensorflow.variables import (
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += basics.__all__


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`allhands.horovod.tensorflow.DistributedOptimizer`, with its arguments in the order of
    Horovod's Keras half."""
    return _DistributedOptimizer(**locals())  # the same names in another order


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedOptimizer` that leaves the gradients of `local_layers` to each rank.

    Args:
        local_layers: a Keras layer or a list of them, which are built; None: none.

    Raises:
        UserError: as `DistributedOptimizer`; a local layer is no Keras layer, or not built.
    """
    given = dict(locals())
    variables = variables_of(given.pop("local_layers"))
    made = _DistributedOptimizer(**given)
    for variable in variables:
        made.register_local_var(variable)
    return made


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce a number or an array over the ranks; returns NumPy's."""
    return reductions.allreduce(
        tf.constant(value),
        average=average,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
    ).numpy()


def allgather(value: Any, name: str | None = None) -> Any:
    """All ranks' arrays, one after another along the first dimension; returns NumPy's."""
    return reductions.allgather(tf.constant(value), name=name).numpy()


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The number or array of global rank `root_rank`; returns NumPy's."""
    return collectives.broadcast(tf.constant(value), root_rank, name=name).numpy()


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """This rank's share of the rows of the arrays, reduced over the ranks; returns NumPy's."""
    return reductions.reducescatter(tf.constant(value), op=op, name=name).numpy()


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A model saved by Keras, with its optimizer made distributed and in the state in which it was
    saved.

    Args:
        filepath: of ``model.save``.
        custom_optimizers: optimizer classes of the user's own.
        custom_objects: as in ``tf.keras.models.load_model``.
        compression: see `DistributedOptimizer`.
        legacy_opts: accepted when False: Keras 3 has no legacy optimizers.
    """
    if legacy_opts:
        raise UserError(
            "load_model(legacy_opts=True): Keras 3 has no legacy optimizers: set legacy_opts=False"
        )
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=known)
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
