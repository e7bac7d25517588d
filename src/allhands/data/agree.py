"""Making sure that all ranks deal from the same data."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sized
from typing import Any

import torch
from torch.utils.data import TensorDataset

from allhands.comm import all_gather_text, broadcast_tensors
from allhands.errors import UserError
from allhands.world import World


def share_data(name: str, dataset: Any, world: World) -> Any:
    """The data set to use on this rank, the same on all of them.

    Scripts that draw random tensors without a seed make other data on each rank. A tensor data set
    is then replaced by rank 0's, which is said once; of other data sets only the length can be
    compared.
    """
    if world.world_size == 1:
        return dataset
    shape = (
        f"{type(dataset).__name__} of "
        f"{len(dataset) if isinstance(dataset, Sized) else 'unknown'} samples"
    )
    content = ""
    if type(dataset) is TensorDataset:
        shape += " with tensors " + ", ".join(
            f"{list(t.shape)} {t.dtype}".replace("torch.", "") for t in dataset.tensors
        )
        content = ",".join(str(checksum(t)) for t in dataset.tensors)
    seen = [text.split("|") for text in all_gather_text(f"{shape}|{content}", world)]
    for rank, (other, _) in enumerate(seen):
        if other != seen[0][0]:
            raise UserError(
                f"the ranks hold different data sets as '{name}': rank 0 a {seen[0][0]}, rank "
                f"{rank} a {other}. Build the same "
                "data on every rank: seed before drawing or splitting, and read the same files"
            )
    if any(found != seen[0][1] for _, found in seen):
        if world.rank == 0:
            print(
                f"allhands: the ranks made different tensors for '{name}' (unseeded random data?); "
                "all use rank 0's",
                file=sys.stderr,
            )
        tensors = [tensor.to(world.device, copy=True) for tensor in dataset.tensors]
        broadcast_tensors(tensors, world)
        return TensorDataset(
            *(new.to(old.device) for new, old in zip(tensors, dataset.tensors, strict=True))
        )
    return dataset


def checksum(tensor: torch.Tensor) -> int:
    """A 32-bit checksum of a tensor's bytes, the same on every rank that holds the same values."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
