"""Running a function in a world of several gloo workers, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import allhands
from allhands.launch import spawn


def in_world(workers: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each rank of a world of CPU workers."""
    return spawn(_call, (function, args), workers=workers)


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    allhands.init(device="cpu")
    try:
        return function(*args)
    finally:
        allhands.finalize()
