"""Tensors that differ by rank, and what calls make of them, eagerly and in a function."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import allhands.horovod.tensorflow as hvd


def mine(*values: float) -> Any:
    """The values times the rank plus one."""
    return tf.constant(values, tf.float32) * (hvd.rank() + 1)


def as_lists(*tensors: Any) -> list[Any]:
    return [tf.cast(tensor, tf.float64).numpy().tolist() for tensor in tensors]


def eager_and_in_a_function(call: Any) -> list[list[Any]]:
    return [as_lists(*call()), as_lists(*tf.function(call)())]
