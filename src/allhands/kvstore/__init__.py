"""Parameter servers: named tensors that all workers share, and a `Trainer` that updates a model
through them.

    store = allhands.kvstore.create("dist")
    trainer = allhands.kvstore.Trainer(net, "adam", {"learning_rate": 0.001}, kvstore=store)

Importing this module imports no torch; each public name brings what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from allhands.errors import refuse_name

_LAZY = {
    "KVStore": "allhands.kvstore.store",
    "RowSparse": "allhands.kvstore.values",
    "Share": "allhands.kvstore.shares",
    "SplitSampler": "allhands.kvstore.data",
    "Trainer": "allhands.kvstore.trainer",
    "create": "allhands.kvstore.factory",
    "replicate": "allhands.kvstore.replicas",
    "split_and_load": "allhands.kvstore.data",
    "split_data": "allhands.kvstore.data",
}

# Names of MXNet's that are not here.
_INSTEAD = {
    "KVStoreBase": "kvstore.KVStore, of which create() makes one",
    "KVStoreServer": "`allhands launch -s 1 …`, which starts the servers",
    "BytePS": "create('dist')",
    "Horovod": "create('dist')",
    "TestStore": "create('local')",
    "clip_global_norm": "torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)",
}

__all__ = [
    "KVStore",
    "RowSparse",
    "Share",
    "SplitSampler",
    "Trainer",
    "create",
    "optimizer",
    "replicate",
    "split_and_load",
    "split_data",
]

if TYPE_CHECKING:
    from allhands.kvstore import optimizers as optimizer
    from allhands.kvstore.data import SplitSampler, split_and_load, split_data
    from allhands.kvstore.factory import create
    from allhands.kvstore.replicas import replicate
    from allhands.kvstore.shares import Share
    from allhands.kvstore.store import KVStore
    from allhands.kvstore.trainer import Trainer
    from allhands.kvstore.values import RowSparse


def __getattr__(name: str) -> Any:
    if name == "optimizer":
        return importlib.import_module("allhands.kvstore.optimizers")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    return refuse_name(__name__, name, _INSTEAD)


def __dir__() -> list[str]:
    return sorted(__all__)
