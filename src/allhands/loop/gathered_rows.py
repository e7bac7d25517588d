"""Rows of all ranks, and random numbers that do not depend on who draws them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from allhands.comm import all_gather_rows
from allhands.world import World


class _Gather(torch.autograd.Function):
    """The rows of all ranks, with a gradient for this rank's own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, world: World) -> torch.Tensor:
        parts = all_gather_rows(tensor.detach().contiguous(), world)
        ctx.begin = sum(len(part) for part in parts[: world.rank])
        ctx.rows = len(tensor)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Each rank has weighted its loss by its share of the samples; the weights add up to one.
        slope = slopes[0].contiguous().clone()
        dist.all_reduce(slope)
        return slope[ctx.begin : ctx.begin + ctx.rows], None


def gather_rows(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """The rows of all ranks, in the order of the ranks; shape ``[rows of all, …]``."""
    if world.world_size == 1:
        return tensor
    gathered: torch.Tensor = _Gather.apply(tensor, world)
    return gathered
