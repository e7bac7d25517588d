"""Running a function in a world of several gloo workers, for tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import allhands
from allhands.launch import spawn

# What a training or a module of tests imports when it needs it, which takes most of a small one's
# time: the process that forks does it once for all.
PRELOAD = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
    "rich.console",
    "rich.progress",
    "allhands.kvstore",
    "allhands.runner",
)
# So that one process forks the workers of worlds of any size.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def in_world(
    workers: int, function: Callable[..., Any], *args: Any, preload: Sequence[str] = ()
) -> list[Any]:
    """What ``function(*args)`` returns on each rank of a world of CPU workers, each with one
    thread. `preload`: what else its module imports and takes long."""
    return spawn(
        _call, (function, args), workers=workers, env=ONE_THREAD, preload=(*PRELOAD, *preload)
    )


def preload() -> None:
    """Import what a training needs, in a process that is about to fork many."""
    for name in PRELOAD:
        importlib.import_module(name)


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    allhands.init(device="cpu")
    try:
        return function(*args)
    finally:
        allhands.finalize()
