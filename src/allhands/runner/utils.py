"""Small helpers under the names that scripts already use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from allhands.launch import spawn
from allhands.loop.workers import gather_nodes, node_task, world_around
from allhands.world import finalize, init
from allhands.world.cores import cores


def distributed_cmd_run(
    worker_fn: Callable[..., Any],
    distributed: bool = True,
    *args: Any,
    workers: int | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``worker_fn(*args, **kwargs)`` on one worker a GPU (a core, without GPUs), each a member
    of one world.

    In a process that is part of a world already (torchrun, srun, mpirun, ``allhands launch``), and
    with ``distributed=False``, the function is called here. Where srun started one task on each of
    several nodes, each starts one worker a GPU of its node. The script around it is never run again
    in the workers.

    Args:
        worker_fn: called on every worker after `allhands.init`; trainings inside it join the world.
        distributed: whether to start workers.
        workers: how many (on each node, under srun); None takes one a GPU, or a core (one, under
            srun on several nodes).

    Returns:
        What rank 0's call returned (on several nodes, that of the node's first worker): None,
        numbers, strings, tensors, or lists and dicts of them.

    Raises:
        WorkerError: a worker failed; the message holds its traceback.
    """
    task = node_task() if distributed else None
    if task is not None:
        count, rendezvous = gather_nodes(task, workers, None)
        if rendezvous is not None:
            return spawn(
                _call_in_world, (worker_fn, args, kwargs), workers=count, rendezvous=rendezvous
            )[0]
    if not distributed or world_around():
        return worker_fn(*args, **kwargs)
    count = workers or torch.cuda.device_count() or cores()
    return spawn(_call_in_world, (worker_fn, args, kwargs), workers=count)[0]


def _call_in_world(
    worker_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    init()
    result = worker_fn(*args, **kwargs)
    finalize()
    return result
