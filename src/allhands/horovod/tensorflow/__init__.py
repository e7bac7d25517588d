"""Horovod's names for TensorFlow 2.16 and newer with Keras 3: ``import allhands.horovod.tensorflow
as hvd``.

Tensors are exchanged by torch.distributed over gloo, through the memory of the host.
"""

from __future__ import annotations

from allhands.horovod.tensorflow.requirements import checked_tensorflow

checked_tensorflow()

from allhands.horovod import basics, reduce_ops
from allhands.horovod.basics import *  # noqa: F403
from allhands.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from allhands.horovod.reduce_ops import *  # noqa: F403
from allhands.horovod.tensorflow import elastic
from allhands.horovod.tensorflow.collectives import alltoall, barrier, broadcast, join
from allhands.horovod.tensorflow.compression import Compression
from allhands.horovod.tensorflow.gradients import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from allhands.horovod.tensorflow.keras.optimizer import DistributedOptimizer
from allhands.horovod.tensorflow.queries import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from allhands.horovod.tensorflow.reductions import (
    allgather,
    allreduce,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from allhands.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from allhands.horovod.tensorflow.variables import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += basics.__all__
__all__ += reduce_ops.__all__
