"""`create`: the store of a name. Importing this module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from allhands.errors import UserError
from allhands.kvstore.credentials import servers_of_job
from allhands.kvstore.store_modes import mode_named

if TYPE_CHECKING:
    from allhands.kvstore.store import KVStore


def create(name: str = "local", **options: Any) -> KVStore:
    """Make a store; on every worker, with the same arguments.

    * ``local``: one worker; sums and updates on the CPU. So are ``local_update_cpu`` and
      ``local_allreduce_cpu``.
    * ``device``: one worker; sums and updates on its devices. So is ``local_allreduce_device``.
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
        if mode.distributed:
            why = "this job has none (`allhands launch -s 1 …` starts them)"
        else:
            why = f"'{name}' never has any"
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
