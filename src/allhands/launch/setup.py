"""What an agent makes of its own process before it forks workers: variables, folder, threads,
imports."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from allhands.environ import set_variables
from allhands.errors import UserError
from allhands.launch import horovod_alias, processes
from allhands.launch.python import versions
from allhands.world.cores import cores


def set_up(
    env: Mapping[str, str | None],
    cwd: str | None,
    local_workers: int | None,
    threads: int | None,
    preload: Sequence[str],
) -> dict[str, Any]:
    """Change this process; returns what the launcher wants to know of it.

    Args:
        env: variables to set, or with None to remove.
        cwd: the folder to go to; None stays.
        local_workers: how many workers there will be here; None: one for each GPU, or for each
            core.
        threads: CPU threads a worker; None: OMP_NUM_THREADS, or the cores divided among the
            workers.
        preload: modules to import now.
    """
    set_variables(env)
    horovod_alias.provide()
    if cwd is not None:
        try:
            os.chdir(cwd)
        except OSError as error:
            raise UserError(
                f"the folder {cwd} cannot be used there ({error.strerror}); --sync-dst-dir DIR "
                "copies the working folder to each host first"
            ) from None
    gpus = processes.gpus() if local_workers is None else None
    if local_workers is None:
        local_workers = gpus or cores()
    # OpenMP reads this once, when torch is loaded, so it has to stand before the preload.
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, cores() // max(1, local_workers))
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    failed = {}
    # Modules are not garbage; to look for some while they are imported takes a fifth of the time.
    gc.disable()
    for name in preload:
        try:
            importlib.import_module(name)
        except (
            Exception
        ) as error:  # the worker that needs it imports it again and shows the whole traceback
            failed[name] = str(error)
    gc.enable()
    return {
        "cores": cores(),
        "gpus": gpus,
        "threads": os.environ["OMP_NUM_THREADS"],
        "versions": versions(),
        "not_preloaded": failed,
    }
