"""The processor cores that this process may use; of the standard library alone, for a host where
nothing is installed."""

from __future__ import annotations

import os


def cores() -> int:
    """Processor cores that this process may use."""
    return len(usable())


def own_mask() -> str:
    """The cores that this process may use, as the bits of a hexadecimal number."""
    return f"{sum(1 << core for core in usable()):x}"


def usable() -> set[int]:
    """Their numbers."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
