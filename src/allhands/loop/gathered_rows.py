"""Rows of all ranks, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from allhands.comm import all_gather_rows
from allhands.world import World


class _Gather(torch.autograd.Function):
    """The rows of all ranks, with a gradient for this rank's own."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, world: World, share: int, holders: Sequence[int]
    ) -> torch.Tensor:
        of_ranks = all_gather_rows(tensor.detach().contiguous(), world)
        parts = [of_ranks[rank] for rank in holders]
        ctx.begin = sum(len(part) for part in parts[:share])
        ctx.rows = len(tensor)
        ctx.copies = world.world_size // len(holders)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # Each rank has weighted its loss by its share of the samples; the weights of the shares add
        # up to one, and so many ranks have the same share.
        slope = slopes[0].contiguous().clone()
        dist.all_reduce(slope)
        return slope[ctx.begin : ctx.begin + ctx.rows] / ctx.copies, None, None, None


def gather_rows(
    tensor: torch.Tensor, world: World, share: int, holders: Sequence[int]
) -> torch.Tensor:
    """The rows of all shares of the samples, in their order; shape ``[rows of all, …]``.

    Args:
        tensor: this rank's rows.
        world: the ranks.
        share: this rank's.
        holders: for each share a rank that has it.
    """
    if len(holders) == 1:
        return tensor
    gathered: torch.Tensor = _Gather.apply(tensor, world, share, holders)
    return gathered
