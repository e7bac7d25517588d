"""Variables and objects that are made the same on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import allhands.horovod.tensorflow as hvd
from tests.horovod.tensorflow.workers import Workers

pytestmark = pytest.mark.serial


def _variables(in_function: bool) -> Any:
    rank = hvd.rank()
    dropout = tf.keras.layers.Dropout(0.5, seed=rank)
    dense = tf.keras.layers.Dense(2, kernel_initializer=tf.keras.initializers.GlorotUniform(rank))
    dense.build((None, 3))
    scalar, integers, half = (
        tf.Variable(rank, dtype=tf.int64),
        tf.Variable([rank, 7]),
        tf.Variable(rank, dtype=tf.bfloat16),
    )
    variables = [*dense.variables, scalar, integers, half, *dropout.variables]

    def run() -> None:
        hvd.broadcast_variables(variables, root_rank=1)

    (tf.function(run) if in_function else run)()
    return [np.asarray(v, np.float64).tolist() for v in variables[:-1]], variables[
        -1
    ].numpy().tolist()


@pytest.mark.parametrize("in_function", [True, False])
def test_variables_are_the_roots_but_for_random_generators(
    workers: Workers, in_function: bool
) -> None:
    (values, seed), (roots, other_seed) = workers(_variables, in_function)
    assert values == roots
    assert roots[2:] == [1, [1, 7], 1]
    assert seed != other_seed


def _in_place() -> Any:
    variables = [tf.Variable([1.0 * hvd.rank()]), tf.Variable(2.0 * hvd.rank())]
    returned = hvd.broadcast_(variables, 1, name="in place")
    return [v.numpy().tolist() for v in variables], [r.numpy().tolist() for r in returned]


def test_in_place_returns_the_new_values(workers: Workers) -> None:
    assert workers(_in_place) == [([[1.0], 2.0], [[1.0], 2.0])] * 2


def _objects() -> Any:
    mine = {"epoch": hvd.rank(), "rates": [0.1, 0.2], "name": f"rank {hvd.rank()}"}
    return (
        hvd.broadcast_object(mine, root_rank=1),
        hvd.broadcast_object_fn(0)(mine)["epoch"],
        hvd.allgather_object(hvd.rank()),
    )


def test_objects_travel(workers: Workers) -> None:
    assert (
        workers(_objects) == [({"epoch": 1, "rates": [0.1, 0.2], "name": "rank 1"}, 0, [0, 1])] * 2
    )


def _lists_differ() -> str:
    variables = [
        tf.Variable(tf.zeros([2, 2]), name="kernel"),
        tf.Variable(tf.zeros([2 + hvd.rank()]), name="bias"),
    ]
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.broadcast_variables(variables, 0)
    return str(error.value)


def test_a_variable_of_another_shape_is_named(workers: Workers) -> None:
    for text in workers(_lists_differ):
        for word in ("variable 1 of bias", "rank 0", "[2]", "rank 1", "[3]"):
            assert word in text, text


def test_what_is_no_variable_is_refused() -> None:
    with pytest.raises(ValueError, match="takes variables; one of them is an? EagerTensor"):
        hvd.broadcast_variables([tf.zeros([1])], 0)


def test_calls_of_tensorflow_1_say_what_to_write() -> None:
    with pytest.raises(
        ValueError, match=r"write hvd\.broadcast_variables\(model\.variables, root_rank=0\)"
    ):
        hvd.broadcast_global_variables(0)
    with pytest.raises(ValueError, match="leave it out"):
        hvd.broadcast_object(1, session=object())


def _monitored() -> list[list[float]]:
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        weight = v1.get_variable("weight", initializer=tf.constant([1.0, 2.0]) * (hvd.rank() + 1))
        v1.train.get_or_create_global_step()
        total = hvd.allreduce(weight, op=hvd.Sum)
        hook = hvd.BroadcastGlobalVariablesHook(1)
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            return [session.run(weight).tolist(), session.run(total).tolist()]


def test_a_monitored_session_begins_with_one_ranks_variables(workers: Workers) -> None:
    assert workers(_monitored) == [[[2.0, 4.0], [4.0, 8.0]]] * 2
