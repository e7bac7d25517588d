"""The most memory that a training took."""

from __future__ import annotations

import resource
import sys

import torch

from allhands.comm import all_gather_rows, calls
from allhands.world import World


def start(world: World) -> None:
    """The training begins: what a GPU has held before does not count."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)


def taken(world: World) -> int:
    """The most bytes that tensors took on this rank's GPU since `start`; without a GPU, that the
    process has ever taken."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def size_of(count: int) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def by_ranks(world: World) -> list[int]:
    """What `taken` gives on each rank; all ranks call it together."""
    calls.note("comparing peak memory")
    mine = torch.tensor([taken(world)], dtype=torch.int64, device=world.device)
    return [int(part) for part in all_gather_rows(mine, world)]


def in_words(by_rank: list[int], world: World) -> str:
    """The line that says it, of the rank that took most."""
    most = max(by_rank)
    size = size_of(most)
    where = "of tensors on the GPU" if world.device.type == "cuda" else "of the process"
    return f"peak memory: {size} {where}" + (
        f" of rank {by_rank.index(most)}" if len(by_rank) > 1 else ""
    )
