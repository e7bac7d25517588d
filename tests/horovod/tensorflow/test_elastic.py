"""States of TensorFlow trainings: committed, restored, the same on all ranks, and taken up by
workers that were started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import allhands.horovod.tensorflow as hvd
import allhands.horovod.tensorflow.keras as hvd_keras
from tests.horovod.tensorflow.workers import Workers

pytestmark = pytest.mark.serial


def model_of(seed: int) -> Any:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((2,)),
            layers.Dropout(0.1, seed=seed),
            layers.Dense(1, kernel_initializer=tf.keras.initializers.GlorotUniform(seed)),
        ]
    )
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1)), "mse")
    return model


def values(model: Any) -> list[Any]:
    return [np.asarray(v).tolist() for v in (*model.weights, *model.optimizer.variables)]


def _kept() -> Any:
    rank = hvd.rank()
    model = model_of(rank)
    state = hvd_keras.elastic.KerasState(model, epoch=0, batch=0)
    inputs = np.ones((6, 2), np.float32)
    elastic = hvd_keras.elastic
    seen: list[Any] = []

    @elastic.run
    def train(state: Any) -> Any:
        first = values(model)
        callbacks = [
            elastic.UpdateEpochStateCallback(state),
            elastic.UpdateBatchStateCallback(state),
            elastic.CommitStateCallback(state, 2),
        ]
        watch = tf.keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append((state.epoch, state.batch))
        )
        model.fit(
            inputs, inputs[:, :1], batch_size=2, epochs=2, callbacks=[*callbacks, watch], verbose=0
        )
        return first

    first = train(state)
    committed = values(model)
    model.fit(inputs, inputs[:, :1], batch_size=2, verbose=0)
    assert values(model) != committed
    state.epoch = 17
    state.restore()
    return first, committed == values(model), state.epoch, seen


def test_a_state_is_the_same_on_all_ranks_and_goes_back_to_its_commit(workers: Workers) -> None:
    (first, restored, epoch, seen), (other, restored_too, _, seen_too) = workers(_kept)
    assert first == other
    assert restored
    assert restored_too
    assert epoch == 2
    assert seen == seen_too == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def _started_again(folder: str) -> Any:
    """What a worker finds that has the variables of a job that was started again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "a-test")
        patch.setenv("ALLHANDS_ELASTIC_DIR", folder)
        half = tf.Variable(tf.cast([1.5, hvd.rank()], tf.bfloat16))
        before = hvd.elastic.TensorFlowState([half], step=3)
        before.commit()
        hvd.barrier()
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        other = tf.Variable(tf.zeros([2], tf.bfloat16))
        found = hvd.elastic.run(lambda state: state.step)(
            hvd.elastic.TensorFlowState([other], step=0)
        )
        return found, other.numpy().astype(float).tolist()


def test_workers_that_are_started_again_take_up_the_commit(
    workers: Workers, tmp_path: Path
) -> None:
    assert workers(_started_again, str(tmp_path)) == [(3, [1.5, 0.0])] * 2
    assert not any(tmp_path.iterdir())


def test_what_cannot_be_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="call model.build"):
        hvd.elastic.TensorFlowKerasState(tf.keras.Sequential([tf.keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match=r"write TensorFlowState\(model.variables"):
        hvd.elastic.TensorFlowState()
