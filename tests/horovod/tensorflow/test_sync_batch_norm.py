"""Batch normalisation over two workers with batches of different sizes, against one process with
both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import allhands.horovod.tensorflow as hvd
from tests.horovod.tensorflow.workers import Workers

pytestmark = pytest.mark.serial

SIZES = (2, 5)


def samples() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    images = random.standard_normal((sum(SIZES), 3, 3, 2)).astype(np.float32) * 3 + 100
    return images, random.standard_normal(images.shape).astype(np.float32)


def normalised(layer: Any, inputs: Any, weights: Any) -> list[Any]:
    """Outputs, the gradient for the inputs, and the running mean and variance."""
    inputs = tf.constant(inputs)

    @tf.function
    def run() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True)
            loss = tf.reduce_sum(outputs * weights)
        return outputs, tape.gradient(loss, inputs)

    outputs, gradient = run()
    return [
        outputs.numpy(),
        gradient.numpy(),
        layer.moving_mean.numpy(),
        layer.moving_variance.numpy(),
    ]


def _on_two() -> Any:
    images, weights = samples()
    here = slice(0, SIZES[0]) if hvd.rank() == 0 else slice(SIZES[0], None)
    return normalised(hvd.SyncBatchNormalization(momentum=0.9), images[here], weights[here])


def test_two_workers_normalise_as_one(workers: Workers) -> None:
    outputs, gradient, mean, variance = normalised(
        tf.keras.layers.BatchNormalization(momentum=0.9), *samples()
    )
    parts = workers(_on_two)
    np.testing.assert_allclose(np.concatenate([part[0] for part in parts]), outputs, atol=2e-4)
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts]), gradient, atol=2e-4)
    for part in parts:
        np.testing.assert_allclose(part[2], mean, rtol=1e-5)
        np.testing.assert_allclose(part[3], variance, rtol=1e-3)


def _masked() -> Any:
    rank = hvd.rank()
    values = tf.reshape(tf.range(6.0), [1, 3, 2]) + 10 * rank
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    layer(values, training=True, mask=tf.constant([[True, rank == 1, False]]))
    return layer.moving_mean.numpy().tolist(), layer.moving_variance.numpy().tolist()


def test_masked_samples_do_not_count(workers: Workers) -> None:
    rows = np.array([[0.0, 1.0], [10.0, 11.0], [12.0, 13.0]])
    for mean, variance in workers(_masked):
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-6)
        np.testing.assert_allclose(variance, rows.var(0), rtol=1e-6)


def test_fused_is_refused() -> None:
    with pytest.raises(ValueError, match="set fused=False"):
        hvd.SyncBatchNormalization(fused=True)
