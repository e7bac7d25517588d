"""One use of each of Horovod's calls for TensorFlow and Keras, on every rank of a world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import allhands.horovod.keras as hvd_keras
import allhands.horovod.tensorflow as hvd

Calls = dict[str, Callable[[], Any]]


def basics(ours: Any, timeline: str) -> Calls:
    """What both halves have; a timeline is written to a file."""
    names = (
        "init is_initialized size local_size cross_size cross_rank mpi_threads_supported "
        "mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built "
        "rocm_built"
    )
    calls = {name: getattr(ours, name) for name in names.split()}
    return {
        **calls,
        "rank": lambda: ours.rank() == hvd.rank(),
        "local_rank": lambda: ours.local_rank() == hvd.rank(),
        "start_timeline": lambda: ours.start_timeline(timeline),
        "stop_timeline": ours.stop_timeline,
        "global_process_set": ours.global_process_set.size,
        "Average": lambda: _lists(ours.allreduce(_mine(), op=ours.Average)),
        "Sum": lambda: _lists(ours.allreduce(_mine(), op=ours.Sum)),
        "Adasum": lambda: _lists(ours.allreduce(_mine(), op=ours.Adasum)),
        "Compression": lambda: _lists(ours.allreduce(_mine(), compression=ours.Compression.fp16)),
    }


def sets(ours: Any) -> Calls:
    """Process sets."""
    some = ours.ProcessSet([0])
    return {
        "ProcessSet": lambda: str(some),
        "add_process_set": lambda: ours.add_process_set(some).process_set_id,
        "ProcessSet.size": some.size,
        "ProcessSet.included": lambda: some.included() == (hvd.rank() == 0),
        "ProcessSet.rank": lambda: hvd.rank() > 0 or some.rank() == 0,
        "remove_process_set": lambda: ours.remove_process_set(some),
    }


def tensorflow(timeline: str) -> Calls:
    """``horovod.tensorflow``."""
    rank, mine, rows = hvd.rank(), _mine(), tf.ones([hvd.rank() + 1, 2])
    variable, state = tf.Variable(_mine()), tf.Variable(_mine())
    model = _model()

    def tape(make: Callable[[Any], Any]) -> list[Any]:
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(model(tf.ones([1, 2]) * (rank + 1)))
        return _lists(make(plain).gradient(loss, model.trainable_variables))

    def broadcast_variables() -> list[Any]:
        hvd.broadcast_variables([variable], 0)
        return _lists(variable)

    return {
        **basics(hvd, timeline),
        **sets(hvd),
        "is_homogeneous": hvd.is_homogeneous,
        "Min": lambda: _lists(hvd.allreduce(mine, op=hvd.Min)),
        "Max": lambda: _lists(hvd.allreduce(mine, op=hvd.Max)),
        "Product": lambda: _lists(hvd.allreduce(mine, op=hvd.Product)),
        "allreduce": lambda: _lists(hvd.allreduce(mine)),
        "grouped_allreduce": lambda: _lists(hvd.grouped_allreduce([mine, mine + 1])),
        "allgather": lambda: _lists(hvd.allgather(rows)),
        "grouped_allgather": lambda: _lists(hvd.grouped_allgather([rows, rows + 1])),
        "broadcast": lambda: _lists(hvd.broadcast(mine, 0)),
        "broadcast_": lambda: _lists(hvd.broadcast_([state], 0)),
        "alltoall": lambda: _lists(hvd.alltoall(tf.range(hvd.size())) - rank),
        "reducescatter": lambda: _lists(hvd.reducescatter(tf.ones([hvd.size()]))),
        "grouped_reducescatter": lambda: _lists(hvd.grouped_reducescatter([tf.ones([2])])),
        "join": lambda: int(hvd.join()) in range(hvd.size()),
        "size_op": lambda: _lists(hvd.size_op()),
        "rank_op": lambda: _lists(hvd.rank_op() - rank),
        "local_size_op": lambda: _lists(hvd.local_size_op()),
        "local_rank_op": lambda: _lists(hvd.local_rank_op() - rank),
        "process_set_included_op": lambda: _lists(hvd.process_set_included_op()),
        "broadcast_variables": broadcast_variables,
        "broadcast_object": lambda: hvd.broadcast_object({"rank": rank}, 0),
        "broadcast_object_fn": lambda: hvd.broadcast_object_fn(0)({"rank": rank}),
        "allgather_object": lambda: hvd.allgather_object({"rank": rank}),
        "broadcast_global_variables": lambda: _refused(lambda: hvd.broadcast_global_variables(0)),
        "BroadcastGlobalVariablesHook": lambda: hvd.BroadcastGlobalVariablesHook(0).root_rank,
        "DistributedOptimizer": lambda: _stepped(hvd.DistributedOptimizer),
        "DistributedGradientTape": lambda: tape(hvd.DistributedGradientTape),
        "PartialDistributedGradientTape": lambda: tape(hvd.PartialDistributedGradientTape),
        "SyncBatchNormalization": lambda: _lists(
            tf.reduce_sum(hvd.SyncBatchNormalization()(rows, training=True)) * 0
        ),
    }


def keras(ours: Any, timeline: str, folder: str) -> Calls:
    """``horovod.keras``, and ``horovod.tensorflow.keras``."""
    mine = np.full(2, float(hvd.rank()), np.float32)

    def load_model() -> list[Any]:
        path = f"{folder}/{hvd.rank()}.keras"
        model = _model()
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model.save(path)
        return [type(ours.load_model(path).optimizer).__name__]

    calls = {
        **basics(ours, timeline),
        "DistributedOptimizer": lambda: _stepped(ours.DistributedOptimizer),
        "broadcast_global_variables": lambda: _refused(lambda: ours.broadcast_global_variables(0)),
        "allreduce": lambda: ours.allreduce(mine).tolist(),
        "allgather": lambda: ours.allgather(mine).tolist(),
        "broadcast": lambda: ours.broadcast(mine, 0).tolist(),
        "reducescatter": lambda: ours.reducescatter(mine).tolist(),
        "load_model": load_model,
    }
    if ours is hvd_keras:
        calls["PartialDistributedOptimizer"] = lambda: _stepped(ours.PartialDistributedOptimizer)
        return calls
    return calls | sets(ours)


def callbacks(ours: Any) -> Calls:
    """``horovod.keras.callbacks``: each in a training of two epochs."""
    made = {
        "BroadcastGlobalVariablesCallback": lambda: ours.BroadcastGlobalVariablesCallback(0),
        "MetricAverageCallback": ours.MetricAverageCallback,
        "LearningRateScheduleCallback": lambda: ours.LearningRateScheduleCallback(0.1, 0.5),
        "LearningRateWarmupCallback": lambda: ours.LearningRateWarmupCallback(0.1, 1),
    }
    return {name: (lambda make=make: _fitted([make()])) for name, make in made.items()}


def elastic(ours: Any, of_keras: bool) -> Calls:
    """``horovod.tensorflow.elastic``, and Keras's."""
    model = _model()
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    kinds: dict[str, Any] = {}
    if of_keras:
        kinds["KerasState"] = ours.KerasState(model, epoch=0, batch=0)
    else:
        kinds["TensorFlowKerasState"] = ours.TensorFlowKerasState(model, epoch=0)
        kinds["TensorFlowState"] = ours.TensorFlowState([tf.Variable(1.0)], step=0)
    methods = ["on_reset", "commit", "check_host_updates", "save", "restore", "sync"]
    calls: Calls = {}
    for name, state in kinds.items():
        calls[name] = lambda state=state: type(state).__name__
        for method in methods:
            calls[f"{name}.{method}"] = getattr(state, method)
        registered = f"{name}.register_reset_callbacks"
        calls[registered] = lambda state=state: state.register_reset_callbacks([])
        calls["run"] = lambda state=state: ours.run(lambda given: given is state)(state)
    if of_keras:
        state = kinds["KerasState"]
        for name in ("CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"):
            calls[name] = lambda name=name: _fitted([getattr(ours, name)(state)])
    return calls


def _mine() -> Any:
    return tf.constant([1.0, 2.0]) * (hvd.rank() + 1)


def _lists(values: Any) -> Any:
    return [_lists(v) for v in values] if isinstance(values, list) else np.asarray(values).tolist()


def _model() -> Any:
    first = tf.keras.initializers.Ones()
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Input((2,)), layers.Dense(1, kernel_initializer=first)])


def _stepped(make: Callable[[Any], Any]) -> list[Any]:
    variable = tf.Variable([1.0, 2.0])
    make(tf.keras.optimizers.SGD(1.0)).apply_gradients([(_mine(), variable)])
    return _lists(variable)


def _fitted(made: list[Any]) -> list[Any]:
    model = _model()
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse")
    inputs = np.full((4, 2), hvd.rank() + 1.0, np.float32)
    model.fit(inputs, inputs[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=made)
    return _lists(list(model.trainable_variables))


def _refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("it was not refused")
