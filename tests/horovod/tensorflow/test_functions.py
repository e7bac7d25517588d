"""Collectives in functions of TensorFlow: their order, their names, and what nobody reads."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

import allhands.horovod.tensorflow as hvd
from allhands.horovod.tensorflow import graphs
from tests.horovod.tensorflow.tensors import mine
from tests.horovod.tensorflow.workers import Workers

pytestmark = pytest.mark.serial


def _other_order() -> list[Any]:
    names = [f"tensor {letter}" for letter in "abcdefgh"]

    @tf.function
    def all_of_them() -> dict[str, Any]:
        order = names if hvd.rank() == 0 else names[::-1]
        return {name: hvd.allreduce(mine(names.index(name)), name=name) for name in order}

    found = []
    for _ in range(3):
        results = all_of_them()
        found.append([results[name].numpy().item() for name in names])
    return found


def test_in_a_function_the_order_of_calls_may_differ(workers: Workers) -> None:
    assert workers(_other_order) == [[[1.5 * i for i in range(8)]] * 3] * 2


def _one_thread(count: int) -> list[Any]:
    """What rank 0 and others get that begin in the opposite order, with one thread of TensorFlow's:
    calls of a function, of functions that it calls, and of loops whose iterations overlap."""
    rank = hvd.rank()
    counter = tf.Variable(0.0)

    @tf.function
    def inner(number: int) -> Any:
        counter.assign_add(1.0)
        return hvd.allreduce(mine(number), name=f"inner {number}")

    @tf.function
    def loop(values: Any) -> Any:
        totals = (tf.zeros([1]), tf.zeros([1]))
        for value in values:
            got = {}
            for place in (0, 1) if rank == 0 else (1, 0):
                got[place] = hvd.allreduce(value * mine(1 + place), name=f"loop {place}")
            totals = (totals[0] + got[0], totals[1] + got[1])
        return totals

    @tf.function
    def step() -> Any:
        order = range(count) if rank == 0 else range(count)[::-1]
        plain = {i: hvd.allreduce(mine(i), name=f"plain {i}") for i in order}
        called = {i: inner(i) for i in order}
        return [[each[i] for i in range(count)] for each in (plain, called)]

    found = []
    for _ in range(3):
        found.append([[value.numpy().item() for value in values] for values in step()])
        sums = loop(tf.range(12, dtype=tf.float32))
        found[-1].append([value.numpy().item() for value in sums])
    assert float(counter) == 3 * count
    return found


def test_in_a_function_the_order_may_differ_with_one_thread_of_tensorflow(
    one_thread: Workers,
) -> None:
    mean = (len(one_thread) + 1) / 2
    plain = [mean * i for i in range(12)]
    sums = [mean * sum(range(12)), 2 * mean * sum(range(12))]
    assert one_thread(_one_thread, 12) == [[[plain, plain, sums]] * 3] * len(one_thread)


def _failed_then_again() -> list[float]:
    """A step that fails on one part, and works the next times."""
    rank = hvd.rank()

    @tf.function
    def step(length: Any) -> Any:
        ragged = hvd.allreduce(tf.ones([length]), name="ragged")
        return tf.reduce_sum(ragged) + hvd.allreduce(mine(1), name="even", op=hvd.Sum)[0]

    for _ in range(2):
        with pytest.raises(tf.errors.UnknownError, match=r"rank 0 gave shape \[1\]"):
            step(tf.constant(2 if rank else 1))
    return [step(tf.constant(2)).numpy().item() for _ in range(20)]


def test_after_an_operation_that_failed_the_next_ones_work(one_thread: Workers) -> None:
    total = 2.0 + sum(range(1, len(one_thread) + 1))
    assert one_thread(_failed_then_again) == [[total] * 20] * len(one_thread)


def _again_and_again() -> list[float]:
    @tf.function
    def several(values: Any) -> Any:
        total = hvd.allreduce(tf.reduce_sum(values))
        for _ in tf.range(3):
            total += hvd.allreduce(tf.reduce_sum(values))
        if total > 1e6:
            total = hvd.allreduce(total)
        return total

    if hvd.rank() == 1:  # traced once more than on rank 0
        several.get_concrete_function(tf.TensorSpec([7]))
    return [several(tf.ones([size])).numpy().item() for size in (2, 3, 2)]


def test_names_do_not_depend_on_how_often_a_function_was_traced(workers: Workers) -> None:
    assert workers(_again_and_again) == [[8.0, 12.0, 8.0]] * 2


def _unread() -> float:
    places = []
    made = graphs.GraphPlace.__init__

    def noted(place: graphs.GraphPlace, *args: Any) -> None:
        made(place, *args)
        places.append(place)

    @tf.function
    def step() -> Any:
        hvd.allreduce(mine(1), name="nobody reads this")
        return hvd.allreduce(mine(1), name="read")

    with mock.patch.object(graphs.GraphPlace, "__init__", noted):
        values = [step().numpy().item() for _ in range(40)]
    assert len(places) == 2
    assert all(len(place._open) <= graphs.KEPT for place in places)
    return values[-1]


def test_a_result_that_nobody_reads_does_not_stop_the_next_call(workers: Workers) -> None:
    assert workers(_unread) == [1.5, 1.5]


def _many() -> float:
    @tf.function
    def step() -> Any:
        return tf.add_n([hvd.allreduce(mine(1)) for _ in range(100)])

    return step().numpy().item()


def test_a_hundred_calls_in_one_function_are_all_read(workers: Workers) -> None:
    assert workers(_many) == [150.0, 150.0]


def _xla() -> str:
    with pytest.raises(ValueError, match="set jit_compile=False") as refused:
        tf.function(lambda: hvd.allreduce(mine(1)), jit_compile=True)()
    return type(refused.value).__name__


def test_xla_is_refused(workers: Workers) -> None:
    assert workers(_xla) == ["UserError"] * 2
