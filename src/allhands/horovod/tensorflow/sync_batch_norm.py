"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from allhands.errors import UserError
from allhands.horovod import reduce_ops
from allhands.horovod.tensorflow.bridge import as_written
from allhands.horovod.tensorflow.reductions import allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """`tf.keras.layers.BatchNormalization` whose mean and variance are those of all ranks' samples
    together.

    Each sample counts once, so that ranks may have batches of different sizes. Sums travel as
    float64.

    Args:
        fused: False, or left out, as in Horovod.
        kwargs: those of `tf.keras.layers.BatchNormalization`.

    Raises:
        UserError: ``fused=True``.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused:
            raise UserError("SyncBatchNormalization(fused=True): set fused=False")
        super().__init__(**kwargs)

    @as_written
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        axes = self._reduction_axes
        values = tf.cast(inputs, tf.float64)
        if mask is None:
            count = tf.cast(tf.size(inputs) / tf.shape(inputs)[self.axis], tf.float64)
            sums, squares = tf.reduce_sum(values, axes), tf.reduce_sum(values * values, axes)
        else:
            weights = tf.broadcast_to(
                tf.cast(tf.expand_dims(mask, -1), tf.float64), tf.shape(inputs)
            )
            count = tf.reduce_sum(weights) / tf.cast(tf.shape(inputs)[self.axis], tf.float64)
            sums = tf.reduce_sum(values * weights, axes)
            squares = tf.reduce_sum(values * values * weights, axes)
        total = allreduce(tf.concat([count[tf.newaxis], sums, squares], axis=0), op=reduce_ops.Sum)
        width = tf.shape(sums)[0]
        mean = total[1 : width + 1] / total[0]
        variance = total[width + 1 :] / total[0] - mean * mean
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
