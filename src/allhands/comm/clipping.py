"""Clipping: gradients are scaled so that their L2 norm is at most a bound; they may lie in parts.

Parts are on several ranks, servers or tensors. The norm is the root of the sum of the parts'
squares, in float64, so that it does not depend on how gradients are cut. The factor is that of
`torch.nn.utils.clip_grad_norm_`, which clips gradients that lie whole in one process. A norm that
is not finite is not hidden: NaN gives NaN, and infinity gives NaN where the gradient is infinite,
so that the weights show that something went wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from allhands.checks import is_number
from allhands.errors import UserError
from allhands.world import World

_EPSILON = 1e-6  # clip_grad_norm_ adds it to the norm


def check_clip_norm(clip_norm: Any) -> None:
    """Raise `UserError` unless it is a bound, or None."""
    if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
        raise UserError(
            f"clip_norm={clip_norm!r}; it must be a positive number, or None for no clipping"
        )


def square_of(values: torch.Tensor) -> float:
    """The sum of the squares of one part, in float64; waits for the device."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def clip_factor(square: float, clip_norm: float) -> float:
    """By what all parts are multiplied.

    Args:
        square: the sum of all parts' squares.
        clip_norm: the bound.
    """
    factor = clip_norm / (math.sqrt(square) + _EPSILON)
    return 1.0 if factor >= 1.0 else factor


def clip_rows(rows: torch.Tensor, clip_norm: float) -> None:
    """Clip each row, shape ``[rows, numbers]``, by itself, in place."""
    rows.mul_(_factors(torch.linalg.vector_norm(rows, dim=1, keepdim=True), clip_norm))


def clip_parts(
    gradients: Sequence[torch.Tensor], copies: Sequence[int], clip_norm: float, world: World
) -> None:
    """Clip gradients whose parts lie on all ranks, in place; all ranks call it.

    Args:
        gradients: this rank's parts, on any device.
        copies: how many ranks hold the same part, for each.
        clip_norm: bound of the norm of all ranks' parts, each counted once.
        world: the ranks.
    """
    square = torch.zeros((), dtype=torch.float64, device=world.device)
    if gradients:
        for count, norm in zip(copies, torch._foreach_norm(list(gradients)), strict=True):
            square += norm.to(world.device, torch.float64).square() / count
    if world.world_size > 1:
        dist.all_reduce(square)
    factor = _factors(square.sqrt(), clip_norm)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))


def _factors(norms: torch.Tensor, clip_norm: float) -> torch.Tensor:
    return (clip_norm / (norms + _EPSILON)).clamp(max=1.0)
