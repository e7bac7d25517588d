"""Activations and gradients of sliced layers, moved between whole and cut."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from allhands.errors import UserError

SEQUENCE = 1  # the dimension of tokens in an activation N x T x width
WHOLE, PARTIAL, SPLIT = Replicate(), Partial(), Shard(SEQUENCE)


def strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


class WithDenseGradient(torch.autograd.Function):
    """A DTensor has no sparse gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.to_dense() if given.is_sparse else given


def check_sequence(name: str, x: torch.Tensor, tp: int) -> None:
    if x.dim() <= SEQUENCE + 1:
        raise UserError(
            f"sequence_parallel=True splits N x T x width along T, and '{name}' got shape "
            f"{list(x.shape)}; set sequence_parallel=False"
        )
    length = x.shape[SEQUENCE]
    filled = -(-length // max(1, -(-length // tp)))
    if filled < tp:
        raise UserError(
            f"sequence_parallel=True splits {length} tokens over tp={tp}, which leaves "
            f"{tp - filled} of the workers "
            f"without any; set tp to {filled} or less, or sequence_parallel=False"
        )


def split_sequence(x: Any, mesh: DeviceMesh) -> Any:
    """A whole activation N x T x width, split along T; anything else as it is."""
    if (
        isinstance(x, DTensor)
        or not isinstance(x, torch.Tensor)
        or x.dim() <= SEQUENCE + 1
        or not x.is_floating_point()
    ):
        return x
    return as_split(move(x, mesh, x.shape, WHOLE, SPLIT, SPLIT, WHOLE), mesh, x.shape)


def part_of(parameter: Any, placements: list[Placement] | None = None) -> torch.Tensor:
    """The local part of a DTensor, whose gradient is placed like `placements` (None: like it)."""
    part: torch.Tensor = parameter.to_local(grad_placements=placements)
    if part.requires_grad:
        part.register_hook(row_major)
    return part


def row_major(gradient: torch.Tensor) -> torch.Tensor:
    """The same numbers with the strides of a new tensor, also in dimensions of size 1.

    DTensor derives the strides of the whole gradient from those of the part. Ranks whose strides
    differ do not ask for the same collectives when PyTorch accumulates it.
    """
    return gradient.reshape(-1).view(gradient.shape)


def whole_sequence(x: Any) -> Any:
    """The inverse of `split_sequence`; anything else as it is."""
    if (
        not isinstance(x, DTensor)
        or x.dim() <= SEQUENCE + 1
        or not x.placements[0].is_shard(SEQUENCE)
    ):
        return x
    return move(x.to_local(), x.device_mesh, x.shape, SPLIT, WHOLE, WHOLE, SPLIT)


def as_split(
    part: torch.Tensor, mesh: DeviceMesh, shape: torch.Size, placement: Placement = SPLIT
) -> DTensor:
    """A DTensor of that whole shape, of which this worker has `part`."""
    return DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=shape, stride=strides(shape)
    )


def move(
    part: torch.Tensor,
    mesh: DeviceMesh,
    shape: torch.Size,
    source: Placement,
    target: Placement,
    back_source: Placement,
    back_target: Placement,
) -> torch.Tensor:
    """What a worker has of a tensor that is placed like `source`, placed like `target`; its
    gradient goes from `back_source` to `back_target`. `shape` is the whole one."""
    return _Move.apply(part, mesh, shape, source, target, back_source, back_target)


class _Move(torch.autograd.Function):
    """Stands on DTensor's redistribution, but not on its backward passes, which changed between
    releases of PyTorch. What it gives is no view unless nothing moves; FSDP warns of modules whose
    output is one."""

    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        mesh: DeviceMesh,
        shape: torch.Size,
        source: Placement,
        target: Placement,
        back_source: Placement,
        back_target: Placement,
    ) -> torch.Tensor:
        ctx.way = mesh, shape, back_source, back_target, source, target
        return redistribute(part, mesh, shape, source, target)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> tuple[Any, ...]:
        # A gradient of this gradient moves as the value did.
        return _Move.apply(given, *ctx.way), *(None,) * 6


def redistribute(
    part: torch.Tensor, mesh: DeviceMesh, shape: torch.Size, source: Placement, target: Placement
) -> torch.Tensor:
    if source == target:
        return part.view_as(part)
    whole = as_split(part, mesh, shape, source)
    local: Any = whole.redistribute(placements=[target]).to_local()
    local = local.wait() if hasattr(local, "wait") else local
    if local.stride() != strides(local.shape):
        # An uneven part is a view of a padded one. PyTorch 2.11 refuses other strides in a pipeline
        # than those that the stage gave on the device "meta", also in dimensions of size 1.
        local = local.clone(memory_format=torch.contiguous_format)
    return local
