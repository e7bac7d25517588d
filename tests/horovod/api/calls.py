"""Every call of Horovod 0.28's documented API, with its arguments, and what it does here.

A call without a note works as in Horovod. A note begins with "differs" or "refused".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        name: in its module; "Class.method" for a method.
        parameters: what Horovod takes.
        state: "works", "differs" or "refused".
        note: what differs, or what to use instead.
    """

    name: str
    parameters: tuple[str, ...]
    state: str
    note: str


_IS_FALSE = "differs: False, since ranks that mpirun started are connected by gloo or nccl"
_BASICS = {
    "init comm process_sets": "differs: `comm` is None, a list of all ranks or an mpi4py "
    "communicator of all; a part of them is refused: use `process_sets`",
    "shutdown": "",
    "is_initialized": "",
    "start_timeline file_path mark_cycles": "differs: `mark_cycles=True` is refused: leave it out, "
    "there are no cycles",
    "stop_timeline": "",
    "size": "",
    "local_size": "",
    "cross_size": "",
    "rank": "",
    "local_rank": "",
    "cross_rank": "",
    "mpi_threads_supported": "differs: always True",
    "mpi_enabled": _IS_FALSE,
    "mpi_built": _IS_FALSE,
    "gloo_enabled": "",
    "gloo_built": "",
    "nccl_built": "",
    "ddl_built": "differs: always False",
    "ccl_built": "differs: always False",
    "cuda_built": "",
    "rocm_built": "",
    "global_process_set": "",
}
_SETS = {
    "ProcessSet ranks_or_comm": "",
    "ProcessSet.rank": "",
    "ProcessSet.size": "",
    "ProcessSet.included": "",
    "add_process_set process_set": "differs: needs no dynamic process sets to be turned on",
    "remove_process_set process_set": "differs: needs no dynamic process sets to be turned on",
}
_OPS = {
    "Average": "",
    "Sum": "",
    "Adasum": "differs: on the CPU and in process sets too; with nccl every rank takes part alike, "
    "where Horovod averages inside a host first",
}
_MORE_OPS = {"Min": "", "Max": "", "Product": ""}
_COMPRESSION = {"Compression": ""}
_OBJECTS = (
    "differs: plain values, containers, tensors and arrays; other classes are refused: use "
    "`torch.serialization.add_safe_globals`"
)
_REDUCE = "average name op prescale_factor postscale_factor process_set"
_SCATTER = "name op process_set prescale_factor postscale_factor"
_ALL_START_AGAIN = "differs: see [elastic training](horovod.md#elastic-training)"
_STATE = {
    "register_reset_callbacks callbacks": "",
    "on_reset": "",
    "commit": "differs: written to a file on each host as well, since all workers start again",
    "check_host_updates": _ALL_START_AGAIN,
    "save": "",
    "restore": "",
    "sync": "",
}

_TORCH = {
    **_BASICS,
    **_SETS,
    **_OPS,
    **_MORE_OPS,
    **_COMPRESSION,
    f"allreduce tensor compression {_REDUCE}": "",
    f"allreduce_ tensor {_REDUCE}": "",
    f"allreduce_async tensor {_REDUCE}": "",
    f"allreduce_async_ tensor {_REDUCE}": "",
    f"grouped_allreduce tensors compression {_REDUCE}": "",
    f"grouped_allreduce_ tensors {_REDUCE}": "",
    f"grouped_allreduce_async tensors {_REDUCE}": "",
    f"grouped_allreduce_async_ tensors {_REDUCE}": "",
    "sparse_allreduce_async tensor name op process_set": "",
    "allgather tensor name process_set": "",
    "allgather_async tensor name process_set": "",
    "grouped_allgather tensors name process_set": "",
    "grouped_allgather_async tensors name process_set": "",
    "broadcast tensor root_rank name process_set": "",
    "broadcast_ tensor root_rank name process_set": "",
    "broadcast_async tensor root_rank name process_set": "",
    "broadcast_async_ tensor root_rank name process_set": "",
    "alltoall tensor splits name process_set": "differs: `splits` of any whole numbers, or a list",
    "alltoall_async tensor splits name process_set": "differs: `splits` of any whole numbers, or a "
    "list",
    f"reducescatter tensor compression {_SCATTER}": "",
    f"reducescatter_async tensor {_SCATTER}": "",
    f"grouped_reducescatter tensors compression {_SCATTER}": "",
    f"grouped_reducescatter_async tensors {_SCATTER}": "",
    "join device": "differs: `Min`, `Max` and `Product` fail while a rank has joined",
    "barrier process_set": "",
    "poll handle": "differs: a handle is an object, not a number",
    "synchronize handle": "differs: a handle is an object, not a number",
    "broadcast_parameters params root_rank": "differs: takes `model.named_parameters()` too",
    "broadcast_optimizer_state optimizer root_rank model": "differs: makes no step to create a "
    "state",
    "broadcast_object obj root_rank name process_set": _OBJECTS,
    "allgather_object obj name": _OBJECTS,
    "DistributedOptimizer optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set": "differs: keeps the "
    "optimizer's state, leaves a parameter alone that has a gradient on no rank, and takes "
    "`zero_grad(set_to_none=True)`",
    "SyncBatchNorm num_features eps momentum affine track_running_stats": "differs: on the CPU too",
    "HorovodInternalError": "",
}
_TORCH_ELASTIC = {
    "run": _ALL_START_AGAIN,
    "TorchState model optimizer": "",
    **{f"TorchState.{name}": note for name, note in _STATE.items()},
    "ElasticSampler dataset shuffle seed": "differs: another order, a function of seed and epoch",
    "ElasticSampler.set_epoch epoch": "",
    "ElasticSampler.record_batch batch_idx batch_size": "",
    "ElasticSampler.state_dict": "",
    "ElasticSampler.load_state_dict state_dict": "",
    "ElasticSampler.reset": "",
}
_DEVICES = (
    "differs: `device_dense` and `device_sparse` are empty or a CPU; others are refused: leave "
    "them out"
)
_TAPE = (
    "device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor "
    "num_groups groups process_set scale_local_gradients"
)
_OPTIMIZER = f"optimizer name backward_passes_per_step average_aggregated_gradients {_TAPE}"
_KERAS_3 = (
    "differs: takes optimizers of Keras 3, whose state stays; those of TensorFlow 1 are refused: "
    "use `tf.keras.optimizers`"
)
_TF_1 = "differs: in graphs of `tf.compat.v1`; elsewhere refused: use `broadcast_variables`"
_SESSION = "; `session=` is refused: leave it out"
_TENSORFLOW = {
    **_BASICS,
    "is_homogeneous": "",
    **_SETS,
    **_OPS,
    **_MORE_OPS,
    **_COMPRESSION,
    f"allreduce tensor device_dense device_sparse compression ignore_name_scope {_REDUCE}": (
        _DEVICES
    ),
    f"grouped_allreduce tensors device_dense device_sparse compression ignore_name_scope "
    f"{_REDUCE}": _DEVICES,
    "allgather tensor name ignore_name_scope process_set": "",
    "grouped_allgather tensors name ignore_name_scope process_set": "",
    "broadcast tensor root_rank name ignore_name_scope process_set": "",
    "broadcast_ variables root_rank name process_set": "",
    "alltoall tensor splits name ignore_name_scope process_set": "differs: `splits` of any whole "
    "numbers",
    f"reducescatter tensor device_dense compression ignore_name_scope {_SCATTER}": _DEVICES,
    "grouped_reducescatter tensors device_dense compression op process_set prescale_factor "
    "postscale_factor": _DEVICES,
    "join": "differs: `Min`, `Max` and `Product` fail while a rank has joined",
    "size_op process_set_id name": "",
    "rank_op name": "",
    "local_size_op name": "",
    "local_rank_op name": "",
    "process_set_included_op process_set_id name": "",
    "broadcast_variables variables root_rank process_set inplace": "differs: leaves the states of "
    "Keras's random generators to each rank",
    "broadcast_object obj root_rank session name process_set": _OBJECTS + _SESSION,
    "broadcast_object_fn root_rank session name process_set": _OBJECTS + _SESSION,
    "allgather_object obj session name process_set": _OBJECTS + _SESSION,
    "broadcast_global_variables root_rank": _TF_1,
    "BroadcastGlobalVariablesHook root_rank device": _TF_1,
    f"DistributedOptimizer use_locking {_OPTIMIZER}": _KERAS_3,
    f"DistributedGradientTape gradtape {_TAPE}": _DEVICES,
    f"PartialDistributedGradientTape gradtape local_layers {_TAPE}": "differs: layers without "
    "variables are refused: build the model first",
    "SyncBatchNormalization fused": "differs: each sample counts once, in batches of any sizes",
}
_TENSORFLOW_ELASTIC = {
    "run": _ALL_START_AGAIN,
    "TensorFlowKerasState model optimizer backend": "",
    **{f"TensorFlowKerasState.{name}": note for name, note in _STATE.items()},
    "TensorFlowState variables session": "differs: `variables` has to be given; `session=` is "
    "refused: leave it out",
    **{f"TensorFlowState.{name}": note for name, note in _STATE.items()},
}
_KERAS = {
    **_BASICS,
    **_OPS,
    **_COMPRESSION,
    f"DistributedOptimizer {_OPTIMIZER}": _KERAS_3,
    "broadcast_global_variables root_rank": _TF_1,
    "allreduce value name average prescale_factor postscale_factor op compression": "",
    "allgather value name": "",
    "broadcast value root_rank name": "",
    "reducescatter value name op": "",
    "load_model filepath custom_optimizers custom_objects compression legacy_opts": "differs: "
    "`legacy_opts=True` is refused: Keras 3 has no legacy optimizers",
}
_PARTIAL = _OPTIMIZER.replace("num_groups ", "")
_KERAS_PARTIAL = {
    f"PartialDistributedOptimizer local_layers {_PARTIAL}": "differs: layers without variables are "
    "refused: build the model first",
}
_CALLBACKS = {
    "BroadcastGlobalVariablesCallback root_rank device local_variables": "differs: before the "
    "first batch where the model is built, so that the first step is equal too",
    "MetricAverageCallback device": "",
    "LearningRateScheduleCallback initial_lr multiplier start_epoch end_epoch staircase "
    "momentum_correction steps_per_epoch": "differs: `momentum_correction` scales the velocities",
    "LearningRateWarmupCallback initial_lr warmup_epochs momentum_correction steps_per_epoch "
    "verbose": "differs: `momentum_correction` scales the velocities",
    "BestModelCheckpoint": "refused: use `tf.keras.callbacks.ModelCheckpoint(path, "
    "save_best_only=True)` on rank 0",
}
_KERAS_ELASTIC = {
    "run": _ALL_START_AGAIN,
    "KerasState model optimizer": "",
    **{f"KerasState.{name}": note for name, note in _STATE.items()},
    "CommitStateCallback state batches_per_commit": "",
    "UpdateBatchStateCallback state": "differs: an epoch that was interrupted is not shortened: "
    "give `fit` the steps that are left",
    "UpdateEpochStateCallback state": "",
}


def _calls(described: dict[str, str]) -> list[Call]:
    made = []
    for words, note in described.items():
        name, *parameters = words.split()
        state, _, text = note.partition(": ") if note else ("works", "", "")
        made.append(Call(name, tuple(parameters), state, text))
    return made


# Horovod's modules, as its documentation names them.
MODULES = {
    "horovod.torch": _calls(_TORCH),
    "horovod.torch.elastic": _calls(_TORCH_ELASTIC),
    "horovod.tensorflow": _calls(_TENSORFLOW),
    "horovod.tensorflow.elastic": _calls(_TENSORFLOW_ELASTIC),
    "horovod.tensorflow.keras": _calls({**_KERAS, **_SETS}),
    "horovod.tensorflow.keras.callbacks": _calls(_CALLBACKS),
    "horovod.tensorflow.keras.elastic": _calls(_KERAS_ELASTIC),
    "horovod.keras": _calls({**_KERAS, **_KERAS_PARTIAL}),
    "horovod.keras.callbacks": _calls(_CALLBACKS),
    "horovod.keras.elastic": _calls(_KERAS_ELASTIC),
}
