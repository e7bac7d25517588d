"""Callbacks of model.fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import allhands.horovod.tensorflow.keras as hvd
from allhands.horovod.keras import callbacks as older_name
from tests.horovod.tensorflow.workers import Workers

pytestmark = pytest.mark.serial

callbacks = hvd.callbacks


def model_of(optimizer: Any, seed: int = 1) -> Any:
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((2,)),
            tf.keras.layers.Dropout(0.5, seed=10 + seed),
            tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.GlorotUniform(seed)),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def fit(model: Any, *used: Any, epochs: int = 1, steps: int = 2) -> Any:
    inputs = np.ones((2 * steps, 2), np.float32) * (hvd.rank() + 1)
    return model.fit(
        inputs, inputs[:, :1], batch_size=2, epochs=epochs, callbacks=list(used), verbose=0
    ).history


class Watch(tf.keras.callbacks.Callback):
    """Notes values before each batch."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look, self.seen = look, []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(self.look(self.model))


def _broadcast(built: bool) -> Any:
    model = model_of(
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9)), seed=1 + hvd.rank()
    )
    if not built:
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(
                    1, kernel_initializer=tf.keras.initializers.GlorotUniform(hvd.rank())
                )
            ]
        )
        model.compile(
            hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse", run_eagerly=True
        )
    weights = Watch(
        lambda model: [weight.tolist() for weight in model.get_weights()] if model.built else None
    )
    fit(model, callbacks.BroadcastGlobalVariablesCallback(0), weights)
    seeds = [v.numpy().tolist() for v in model.variables if v.name == "seed_generator_state"]
    return weights.seen[0], [weight.tolist() for weight in model.get_weights()], seeds


def test_all_ranks_begin_with_the_weights_of_the_root_and_keep_their_own_dropout(
    workers: Workers,
) -> None:
    (first, last, seeds), (first_too, last_too, other_seeds) = workers(_broadcast, True)
    assert first == first_too  # before the first batch
    assert last == last_too
    assert seeds
    assert seeds != other_seeds


def test_a_model_that_is_not_built_is_broadcast_after_the_first_batch(workers: Workers) -> None:
    (_, last, _), (_, last_too, _) = workers(_broadcast, False)
    assert last == last_too


def _local() -> Any:
    model = model_of(tf.keras.optimizers.SGD(0.0), seed=1 + hvd.rank())
    kernel, bias = model.trainable_variables
    bias.assign([float(hvd.rank())])
    before = kernel.numpy().tolist()
    fit(model, callbacks.BroadcastGlobalVariablesCallback(1, local_variables=[kernel]))
    return kernel.numpy().tolist() == before, bias.numpy().tolist()


def test_local_variables_are_left_alone(workers: Workers) -> None:
    assert workers(_local) == [(True, [1.0])] * 2


def _metrics() -> Any:
    seen: list[float] = []
    last = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])
    )
    model = tf.keras.Sequential(
        [tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    model.compile(tf.keras.optimizers.SGD(0.0), "mse")
    history = fit(model, callbacks.MetricAverageCallback(), last)
    return history["loss"], seen


def test_metrics_are_means_over_the_ranks_for_the_callbacks_that_follow(workers: Workers) -> None:
    # The targets are 1 and 2, and what is predicted is 0.
    assert workers(_metrics) == [([2.5], [2.5])] * 2


def harmonic(epoch: float) -> float:
    return 1 / (1 + epoch)


def _rates(name: str, options: dict[str, Any]) -> Any:
    rates = Watch(lambda model: float(model.optimizer.learning_rate.numpy()))
    model = model_of(tf.keras.optimizers.SGD(0.8))
    return rates.seen, fit(model, getattr(callbacks, name)(**options), rates, epochs=3)["lr"]


@pytest.mark.parametrize(
    ("name", "options", "rates"),
    [
        (
            "LearningRateWarmupCallback",
            {"initial_lr": 0.8, "warmup_epochs": 2},
            [0.5, 0.6, 0.7, 0.8, 0.8, 0.8],
        ),
        (
            "LearningRateScheduleCallback",
            {"initial_lr": 0.8, "multiplier": 0.5},
            [0.8, 0.8, 0.4, 0.4, 0.2, 0.2],
        ),
        (
            "LearningRateScheduleCallback",
            {"initial_lr": 0.4, "multiplier": 0.5, "start_epoch": 1, "end_epoch": 2},
            [0.8, 0.8, 0.4, 0.4, 0.4, 0.4],
        ),
        (
            "LearningRateScheduleCallback",
            {"initial_lr": 0.8, "multiplier": harmonic, "staircase": False},
            [0.8, 0.8 / 1.5, 0.4, 0.32, 0.8 / 3, 0.8 / 3.5],
        ),
    ],
)
def test_learning_rates(
    workers: Workers, name: str, options: dict[str, Any], rates: list[float]
) -> None:
    for seen, logged in workers(_rates, name, options):
        np.testing.assert_allclose(seen, rates, rtol=1e-6)
        np.testing.assert_allclose(logged, rates[1::2], rtol=1e-6)


def _momentum(correction: bool) -> list[float]:
    """The velocity after two batches with a gradient of 1, the second at a tenth of the rate."""
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((1,)),
            tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    model.compile(tf.keras.optimizers.SGD(1.0, momentum=0.5), lambda target, given: given)
    schedule = callbacks.LearningRateScheduleCallback(1.0, 0.1, momentum_correction=correction)
    model.fit(
        np.ones((1, 1), np.float32),
        np.ones((1, 1), np.float32),
        epochs=2,
        callbacks=[schedule],
        verbose=0,
    )
    return model.optimizer.momentums[0].numpy().ravel().tolist()


@pytest.mark.parametrize("correction", [True, False])
def test_velocities_follow_the_rate_if_asked(correction: bool) -> None:
    factor = 0.1 if correction else 1.0  # of the velocity -1 after the first batch
    np.testing.assert_allclose(_momentum(correction), [0.5 * factor * -1.0 - 0.1], rtol=1e-6)


def test_what_cannot_be_scheduled_is_refused() -> None:
    with pytest.raises(ValueError, match="needs initial_lr"):
        callbacks.LearningRateWarmupCallback(None)
    model = model_of(tf.keras.optimizers.SGD(tf.keras.optimizers.schedules.CosineDecay(0.1, 10)))
    with pytest.raises(ValueError, match="give the optimizer a number"):
        model.fit(
            np.ones((2, 2)),
            np.ones((2, 1)),
            callbacks=[callbacks.LearningRateScheduleCallback(0.1, 0.5)],
            verbose=0,
        )
    endless = tf.data.Dataset.from_tensors((np.ones((2, 2)), np.ones((2, 1)))).repeat()
    model = model_of(tf.keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="set steps_per_epoch"):
        model.fit(endless, callbacks=[callbacks.LearningRateWarmupCallback(0.1)], verbose=0)


def test_horovods_older_name_is_the_same() -> None:
    assert older_name.LearningRateWarmupCallback is callbacks.LearningRateWarmupCallback
