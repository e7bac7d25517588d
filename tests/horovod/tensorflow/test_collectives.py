"""Collectives on TensorFlow tensors over two workers."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import allhands.horovod.tensorflow as hvd
from tests.horovod.tensorflow.tensors import eager_and_in_a_function, mine
from tests.horovod.tensorflow.workers import Workers

pytestmark = pytest.mark.serial

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def _all_kinds() -> list[list[Any]]:
    rank = hvd.rank()

    def call() -> list[Any]:
        rows = tf.reshape(tf.range(6.0), [3, 2]) + rank
        dealt, counts = hvd.alltoall(tf.range(4) + 10 * rank, splits=tf.constant([1, 3], tf.int64))
        return [
            hvd.allreduce(mine(1, 2)),
            hvd.allreduce(mine(1, 2), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
            hvd.allreduce(mine(1, -2), op=hvd.Min),
            hvd.allreduce(mine(1, -2), op=hvd.Max),
            hvd.allreduce(mine(1, 3), op=hvd.Product),
            hvd.allreduce(mine(1, 3), op=hvd.Adasum),
            hvd.allreduce(tf.constant(1.5) * rank),
            hvd.allgather(mine(1, 2)[: rank + 1]),
            hvd.broadcast(mine(1, 2), root_rank=1),
            hvd.alltoall(tf.range(4) + 10 * rank),
            dealt,
            counts,
            hvd.reducescatter(rows, op=hvd.Sum),
            *hvd.grouped_allreduce([mine(1), mine(4)], average=False),
            *hvd.grouped_allgather([mine(1), mine(2)]),
            *hvd.grouped_reducescatter([rows], op=hvd.Average),
            hvd.size_op(),
            hvd.rank_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(),
            hvd.process_set_included_op(),
        ]

    return eager_and_in_a_function(call)


def test_every_collective_gives_the_same_eagerly_and_in_a_function(workers: Workers) -> None:
    shared = [
        [1.5, 3.0],
        [3.0, 6.0],
        [1.0, -4.0],
        [2.0, -2.0],
        [2.0, 18.0],
        [1.5, 4.5],
        0.75,
        [1.0, 2.0, 4.0],
        [2.0, 4.0],
    ]
    own = [
        [[0.0, 1.0, 10.0, 11.0], [0.0, 10.0], [1.0, 1.0], [[1.0, 3.0], [5.0, 7.0]]],
        [[2.0, 3.0, 12.0, 13.0], [1.0, 2.0, 3.0, 11.0, 12.0, 13.0], [3.0, 3.0], [[9.0, 11.0]]],
    ]
    halves = [[[0.5, 1.5], [2.5, 3.5]], [[4.5, 5.5]]]
    for rank, (eager, graph) in enumerate(workers(_all_kinds)):
        expected = [
            *shared,
            *own[rank],
            [3.0],
            [12.0],
            [1.0, 2.0],
            [2.0, 4.0],
            halves[rank],
            2.0,
            rank,
            rank,
            2.0,
            1.0,
        ]
        for given, wanted in zip(eager, expected, strict=True):
            np.testing.assert_allclose(given, wanted, rtol=1e-6)
        for given, wanted in zip(graph, expected, strict=True):
            np.testing.assert_allclose(given, wanted, rtol=1e-6)


def _dtypes() -> list[list[Any]]:
    def call() -> list[Any]:
        return [hvd.allreduce(tf.cast(mine(2, 4), dtype), op=hvd.Sum) for dtype in DTYPES]

    return eager_and_in_a_function(call)


def test_every_dtype_is_added_up(workers: Workers) -> None:
    for eager, graph in workers(_dtypes):
        assert eager == graph == [[6.0, 12.0]] * len(DTYPES)


def _unsigned() -> tuple[list[int], str]:
    state = tf.constant([2**32 - 1 - hvd.rank()], tf.uint32)
    with pytest.raises(ValueError, match="the tensor is uint32; cast it to one of") as refused:
        hvd.allreduce(state, name="states")
    return hvd.broadcast(state, 1).numpy().tolist(), str(refused.value)


def test_unsigned_integers_travel_but_are_not_added_up(workers: Workers) -> None:
    for received, refused in workers(_unsigned):
        assert received == [2**32 - 2]
        assert "'states'" in refused


def _narrowed() -> list[float]:
    value = tf.constant([1 + 2**-12])
    compressions = (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16)
    return [
        hvd.allreduce(value, compression=compression).numpy().item() for compression in compressions
    ]


def test_compression_narrows_what_travels(workers: Workers) -> None:
    assert workers(_narrowed) == [[1 + 2**-12, 1.0, 1.0]] * 2


def _slopes() -> list[Any]:
    def call() -> list[Any]:
        x = mine(1, 2)
        weight = float(hvd.rank() + 1)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            average = hvd.allreduce(x * x) * weight
            added = hvd.allreduce(x * x, op=hvd.Sum, prescale_factor=2.0) * weight
            gathered = hvd.allgather(x * x) * weight
            sent = hvd.broadcast(x * x, 0) * weight
            dealt = hvd.alltoall(x * x) * weight
            scattered = hvd.reducescatter(x * x, op=hvd.Sum) * weight
        return [tape.gradient(y, x) for y in (average, added, gathered, sent, dealt, scattered)]

    return eager_and_in_a_function(call)


def test_collectives_have_horovods_gradients(workers: Workers) -> None:
    for rank, (eager, graph) in enumerate(workers(_slopes)):
        inner = np.array([2.0, 4.0]) * (rank + 1)
        root = inner * 1.5 if rank == 0 else inner * 0
        wanted = [inner * 1.5, inner * 6, inner * 1.5, root, inner * [1, 2], inner * [2, 4]]
        np.testing.assert_allclose(eager, wanted)
        np.testing.assert_allclose(graph, wanted)


def _no_slope() -> str:
    x = mine(1)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = hvd.allreduce(x, op=hvd.Max)
    with pytest.raises(ValueError, match="op=Max has no gradient") as refused:
        tape.gradient(y, x)
    return str(refused.value)


def test_a_maximum_has_no_gradient(workers: Workers) -> None:
    assert "stop it with tf.stop_gradient" in workers(_no_slope)[0]


def _mismatches() -> list[str]:
    rank = hvd.rank()
    texts = []
    for call in (
        lambda: hvd.allreduce(tf.zeros([3 + rank]), name="weights"),
        lambda: hvd.allreduce(tf.zeros([3], [tf.float32, tf.float64][rank]), name="weights"),
        lambda: hvd.allreduce(tf.zeros([3]), name="weights", op=[hvd.Sum, hvd.Max][rank]),
        lambda: hvd.broadcast(tf.zeros([3]), rank, name="weights"),
    ):
        with pytest.raises(hvd.HorovodInternalError) as eager:
            call()
        texts.append(str(eager.value))
        with pytest.raises(tf.errors.UnknownError) as graph:
            tf.function(call)()
        texts.append(str(graph.value))
    assert hvd.allreduce(mine(1)).numpy().item() == 1.5  # and on we go
    return texts


def test_what_differs_over_ranks_is_named_on_all_of_them(workers: Workers) -> None:
    values = [("[3]", "[4]"), ("float32", "float64"), ("Sum", "Max"), ("0", "1")]
    for texts in workers(_mismatches):
        for text, (first, second) in zip(
            texts, [pair for pair in values for _ in range(2)], strict=True
        ):
            assert "HorovodInternalError" in text or text.startswith(("allreduce", "broadcast"))
            for word in ("'weights'", "rank 0", "rank 1", first, second):
                assert word in text, text


def _restarted(**variables: str) -> None:
    hvd.shutdown()
    os.environ.update(variables)
    hvd.init()


def _missing() -> str:
    _restarted(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="2", HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    try:
        if hvd.rank() == 0:
            with pytest.raises(tf.errors.UnknownError) as missed:
                tf.function(lambda: hvd.allreduce(mine(1), name="only rank 0"))()
            return str(missed.value)
        time.sleep(4)  # longer than the other waits
        return ""
    finally:
        del (
            os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"],
            os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"],
        )
        _restarted()


def test_a_call_that_a_rank_does_not_make_is_an_error(workers: Workers) -> None:
    text = workers(_missing)[0]
    assert "'only rank 0'" in text
    assert "rank 1" in text


def _both_halves() -> list[float]:
    import torch

    import allhands.horovod.torch as hvd_torch

    rank = hvd.rank()
    handle = hvd_torch.allreduce_async(torch.ones(2) * (rank + 1), name="of torch")
    value = hvd.allreduce(mine(1), name="of tensorflow").numpy().item()
    return [value, *hvd_torch.synchronize(handle).tolist()]


def test_torch_and_tensorflow_share_one_engine(workers: Workers) -> None:
    assert workers(_both_halves) == [[1.5, 1.5, 1.5]] * 2


def _twice() -> str:
    import torch

    import allhands.horovod.torch as hvd_torch

    text = ""
    if hvd.rank() == 0:
        handle = hvd_torch.allreduce_async(torch.ones(1), name="twice")
        with pytest.raises(ValueError, match="wait for it") as refused:
            hvd.allreduce(mine(1), name="twice")
        text = str(refused.value)
    hvd.barrier()
    if hvd.rank() == 1:
        handle = hvd_torch.allreduce_async(torch.ones(1), name="twice")
    assert hvd_torch.synchronize(handle).item() == 1
    return text


def test_a_tensor_reduced_twice_at_once_is_named(workers: Workers) -> None:
    text = workers(_twice)[0]
    assert "'twice'" in text
    assert "rank 0" in text


def _joined() -> list[float]:
    sums = [hvd.allreduce(mine(1), name=f"batch {i}").numpy().item() for i in range(1 + hvd.rank())]
    return [*sums, hvd.join().numpy().item()]


def test_a_rank_without_data_joins_and_gives_zeros(workers: Workers) -> None:
    assert workers(_joined) == [[1.5, 1], [1.5, 1.0, 1]]


def _subset() -> Any:
    alone = hvd.add_process_set([1])
    try:
        value = (
            hvd.allreduce(mine(1), process_set=alone).numpy().item() if alone.included() else None
        )
        return value, hvd.process_set_included_op(alone.process_set_id).numpy().item()
    finally:
        hvd.remove_process_set(alone)


def test_a_process_set_leaves_the_others_out(workers: Workers) -> None:
    assert workers(_subset) == [(None, 0), (2.0, 1)]


@pytest.mark.parametrize("argument", ["device_dense", "device_sparse"])
def test_a_gpu_is_refused_as_the_place_of_the_exchange(argument: str) -> None:
    with pytest.raises(ValueError, match=f"leave {argument} out"):
        hvd.allreduce(tf.zeros([1]), **{argument: "/gpu:0"})


def test_before_init_is_an_error() -> None:
    variable = tf.Variable(1.0)

    @tf.function
    def traced() -> None:
        hvd.broadcast_variables([variable], 0)

    def tape() -> None:
        with tf.GradientTape() as inner:
            loss = variable * 2
        hvd.DistributedGradientTape(inner).gradient(loss, [variable])

    for call in (hvd.rank, lambda: hvd.allreduce(tf.zeros([1])), traced, tape):
        with pytest.raises(Exception, match=r"hvd\.init\(\)"):
            call()
