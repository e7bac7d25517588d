"""Parameter servers: named tensors that all workers share, and a `Trainer` that updates a model
through them.

    store = allhands.kvstore.create("dist")
    trainer = allhands.kvstore.Trainer(net, "adam", {"learning_rate": 0.001}, kvstore=store)

Importing this module imports no torch; each public name brings what it needs when it is first used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from allhands.errors import UserError

_LAZY = {
    "KVStore": "allhands.kvstore.store",
    "RowSparse": "allhands.kvstore.values",
    "Share": "allhands.kvstore.shares",
    "SplitSampler": "allhands.kvstore.data",
    "Trainer": "allhands.kvstore.trainer",
    "replicate": "allhands.kvstore.replicas",
    "split_and_load": "allhands.kvstore.data",
    "split_data": "allhands.kvstore.data",
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
    from allhands.kvstore.replicas import replicate
    from allhands.kvstore.shares import Share
    from allhands.kvstore.store import KVStore
    from allhands.kvstore.trainer import Trainer
    from allhands.kvstore.values import RowSparse


def create(name: str = "local", **options: Any) -> KVStore:
    """Make a store; on every worker, with the same arguments.

    * ``local``: one worker; sums and updates on the CPU.
    * ``device``: one worker; sums and updates on its devices.
    * ``dist``, ``dist_sync``: all workers of the world; each step waits for the gradients of all.
    * ``dist_device_sync``, ``dist_sync_device``: the same; with servers, the workers of one host
      add their gradients up among themselves, and the first of them pushes the sum.
    * ``dist_async``: all workers; the servers apply each one's gradients when they come.
    * ``dist_ssp``: all workers; as async, but nobody runs more than `staleness` steps ahead.

    The synchronous ones work with servers (``allhands launch -s 2 …``) and without: then each
    worker updates 1/N of the weights, and the values travel over torch.distributed. `allhands.init`
    is called if it was not.

    Args:
        name: the kind of store, in any case of letters.
        options: of a store with servers, such as `staleness` or `on_worker_loss`.

    Raises:
        UserError: there is no such kind, it needs servers and the job has none, or an option does
            not belong to it.
    """
    from allhands.kvstore.store_modes import mode_named

    mode = mode_named(name)
    if mode.by_host and servers_of_job():
        from allhands.kvstore.host_store import connect

        return connect(mode, options)
    if mode.distributed and servers_of_job():
        from allhands.kvstore.served import ServedStore

        return ServedStore.connect(mode, options)
    if mode.distributed and mode.wait != "sync":
        raise UserError(
            f"create('{name}') needs parameter servers, and this job has none: write `allhands "
            "launch -s 1 …`, or create('dist_sync')"
        )
    if options:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        why = (
            "this job has none (`allhands launch -s 1 …` starts them)"
            if mode.distributed
            else f"'{name}' never has any"
        )
        raise UserError(
            f"create('{name}', {given}): options are for stores with servers, and {why}; leave "
            "them out"
        )
    if mode.distributed:
        from allhands.kvstore.collective import CollectiveStore
        from allhands.world import init

        return CollectiveStore(mode, init())
    import torch

    from allhands.kvstore.local_store import LocalStore

    return LocalStore(mode, device=torch.device("cpu") if mode.name == "local" else None)


def servers_of_job() -> int:
    """How many servers the launcher has started for this job.

    Raises:
        UserError: the variable that tells is no number.
    """
    told = os.environ.get("ALLHANDS_NUM_SERVERS") or "0"
    try:
        return int(told)
    except ValueError:
        raise UserError(
            f"ALLHANDS_NUM_SERVERS is {told!r}; it is a whole number, set by the launcher"
        ) from None


def __getattr__(name: str) -> Any:
    if name == "optimizer":
        return importlib.import_module("allhands.kvstore.optimizers")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'allhands.kvstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
