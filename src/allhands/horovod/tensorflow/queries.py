"""Who this process is, asked when a graph runs and not when it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from allhands.errors import UserError
from allhands.horovod import basics, engine
from allhands.horovod.process_sets import ProcessSet
from allhands.horovod.tensorflow.bridge import as_written


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks when the graph runs, an int32 scalar."""
    return number_from(lambda: _set_of(process_set_id).size(), name)


@as_written
def rank_op(name: str | None = None) -> Any:
    """The rank when the graph runs, an int32 scalar."""
    return number_from(basics.rank, name)


@as_written
def local_rank_op(name: str | None = None) -> Any:
    """The local rank when the graph runs, an int32 scalar."""
    return number_from(basics.local_rank, name)


@as_written
def local_size_op(name: str | None = None) -> Any:
    """The number of ranks of this host when the graph runs, an int32 scalar."""
    return number_from(basics.local_size, name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 when the graph runs on a rank of the process set, else 0: an int32 scalar."""
    return number_from(lambda: int(_set_of(process_set_id).included()), name)


def number_from(function: Callable[[], int], name: str | None = None) -> Any:
    """An int32 scalar that Python computes whenever the graph runs."""
    result = tf.numpy_function(lambda: tf.int32.as_numpy_dtype(function()), [], tf.int32, name=name)
    result = tf.convert_to_tensor(result, tf.int32)
    if not tf.executing_eagerly():
        result.set_shape([])
    return result


def _set_of(process_set_id: int) -> ProcessSet:
    found = engine.current().set_by_id(process_set_id)
    if found is None:
        raise UserError(
            f"process_set_id={process_set_id}: no process set in use has that number; "
            "add_process_set() gives it one"
        )
    return found
