"""Horovod's names for PyTorch: ``import allhands.horovod.torch as hvd``.

What is different from Horovod, and why, is on the page docs/horovod.md.
"""

from __future__ import annotations

from allhands.horovod import basics, reduce_ops
from allhands.horovod.basics import *  # noqa: F403
from allhands.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from allhands.horovod.reduce_ops import *  # noqa: F403
from allhands.horovod.torch import elastic, functions, reductions, rows
from allhands.horovod.torch.compression import Compression
from allhands.horovod.torch.functions import *  # noqa: F403
from allhands.horovod.torch.ops import barrier, join
from allhands.horovod.torch.optimizer import DistributedOptimizer
from allhands.horovod.torch.pending import poll, synchronize
from allhands.horovod.torch.reductions import *  # noqa: F403
from allhands.horovod.torch.rows import *  # noqa: F403
from allhands.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "barrier",
    "elastic",
    "join",
    "poll",
    "synchronize",
]
__all__ += basics.__all__
__all__ += reduce_ops.__all__
__all__ += functions.__all__
__all__ += reductions.__all__
__all__ += rows.__all__
