"""Clipping of gradients that lie in parts, against PyTorch's of the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from allhands import UserError, current_world
from allhands.comm.clipping import check_clip_norm, clip_factor, clip_parts, clip_rows, square_of
from tests.worlds import in_world


def whole(bound: float, bad: float | None = None) -> torch.Tensor:
    """A gradient of 31 numbers, clipped by PyTorch."""
    parameter = nn.Parameter(torch.zeros(31))
    parameter.grad = torch.randn(31, generator=torch.Generator().manual_seed(0))
    if bad is not None:
        parameter.grad[5] = bad
    nn.utils.clip_grad_norm_([parameter], bound)
    return parameter.grad


def clipped(bound: float, bad: float | None = None) -> list[torch.Tensor]:
    """The same, of which this rank has a part of 15 or 16 numbers; the first number is on both
    ranks."""
    world: Any = current_world()
    gradient = torch.randn(31, generator=torch.Generator().manual_seed(0))
    if bad is not None:
        gradient[5] = bad
    own = [gradient[:1].clone(), (gradient[1:16] if world.rank == 0 else gradient[16:]).clone()]
    clip_parts(own, [2, 1], bound, world)
    return own


def in_parts() -> dict[str, list[torch.Tensor]]:
    found = {f"{bound}": clipped(bound) for bound in (0.5, 3.0, 1e6)}
    return found | {f"{bad}": clipped(1.0, bad) for bad in (math.inf, math.nan)}


@pytest.mark.serial
def test_parts_on_ranks_are_clipped_as_the_whole() -> None:
    first, second = in_world(2, in_parts)
    for name in first:
        assert torch.allclose(first[name][0], second[name][0], rtol=0, atol=0, equal_nan=True)
        ours = torch.cat([*first[name], second[name][1]])
        theirs = whole(1.0, float(name)) if name in ("inf", "nan") else whole(float(name))
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=0, equal_nan=True), name
        assert bool(ours.isnan().any()) == (name in ("inf", "nan"))


@pytest.mark.parametrize("bound", [0.5, 1e6])
def test_a_factor_and_rows_are_those_of_pytorch(bound: float) -> None:
    gradient = whole(math.inf)
    factor = clip_factor(square_of(gradient[:10]) + square_of(gradient[10:]), bound)
    assert torch.allclose(gradient * factor, whole(bound), rtol=1e-6, atol=0)
    rows = torch.stack([gradient, torch.zeros(31)])
    clip_rows(rows, bound)
    assert torch.allclose(rows[0], whole(bound), rtol=1e-6, atol=0)
    assert not rows[1].any()
    assert math.isnan(clip_factor(math.nan, bound))


@pytest.mark.parametrize("bound", [0, -1.0, math.nan, True, "1"])
def test_what_is_no_bound_is_refused(bound: Any) -> None:
    with pytest.raises(
        UserError, match=r"clip_norm=.*; it must be a positive number, or None for no clipping"
    ):
        check_clip_norm(bound)
    check_clip_norm(None)
    check_clip_norm(2)
