"""What can be seen to be wrong on one rank, before anything is sent: each raises `UserError`,
naming the operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp

from allhands.errors import UserError


def dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, when it has memory that can travel."""
    if tensor.layout != torch.strided or tensor.device.type not in {"cpu", "cuda"}:
        layout = str(tensor.layout).removeprefix("torch.")
        raise UserError(
            f"{name}: a {layout} tensor on {tensor.device} cannot travel over MPI; pass a dense "
            "one of the CPU or CUDA"
        )
    return tensor


def complex_as_pairs(name: str, tensors: Sequence[torch.Tensor], op: Any) -> list[torch.Tensor]:
    """What a reduction counts with: complex numbers as pairs of real ones, in the same memory."""
    for tensor in tensors:
        if tensor.is_complex() and (op not in (ReduceOp.SUM, ReduceOp.AVG) or tensor.is_conj()):
            what = (
                "a lazily conjugated tensor" if tensor.is_conj() else f"complex numbers with {op}"
            )
            raise UserError(
                f"{name} of {what} over MPI: write ReduceOp.SUM, and pass tensor.resolve_conj() or "
                "torch.view_as_real(tensor)"
            )
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def check_root(group: ProcessGroup, name: str, root: int) -> int:
    if not 0 <= root < group.size():
        raise UserError(
            f"{name}: group rank {root} as root, but the group has ranks 0 to {group.size() - 1}"
        )
    return root


def check_parts(
    group: ProcessGroup, name: str, which: str, given: Any, one: torch.Tensor, other: str
) -> None:
    """`given`, a list of one tensor a rank or one tensor of all of them, must hold a tensor like
    `one` for each rank."""
    listed = isinstance(given, list)
    if listed and len(given) != group.size():
        raise UserError(
            f"{name} over {group.size()} ranks needs as many {which} tensors, but got {len(given)}"
        )
    wanted = one.numel() * (1 if listed else group.size())
    for part in given if listed else [given]:
        if part.dtype != one.dtype or part.numel() != wanted:
            raise UserError(
                f"{name} over {group.size()} ranks: the {other} is {shape_of(one)}, so "
                f"{'each' if listed else 'the'} {which} "
                f"must have {wanted} elements of {one.dtype}, but one is {shape_of(part)}"
            )


def at_root(
    group: ProcessGroup,
    name: str,
    which: str,
    lists: Sequence[Sequence[torch.Tensor]],
    root: int,
    own: torch.Tensor,
) -> list[torch.Tensor]:
    """The tensors that only the root passes, one a rank; none elsewhere."""
    if group.rank() != root:
        if lists and len(lists[0]):
            raise UserError(
                f"{name}: {which} is for group rank {root} alone; leave it out on the other ranks"
            )
        return []
    parts = list(lists[0]) if lists else []
    check_parts(group, name, which, parts, own, "tensor")
    return parts


def check_splits(
    group: ProcessGroup, name: str, which: str, tensor: torch.Tensor, splits: Sequence[int]
) -> list[int]:
    """Rows for each rank along the first dimension; no `splits`: the same number for each."""
    rows = tensor.shape[0] if tensor.dim() else 0
    size = group.size()
    if not splits:
        if tensor.dim() == 0 or rows % size:
            raise UserError(
                f"{name}: {size} ranks cannot share the {which}'s {rows} rows evenly; pass "
                f"{which}_split_sizes"
            )
        return [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise UserError(
            f"{name}: {which}_split_sizes={list(splits)} must be {size} numbers with the sum "
            f"{rows}, its rows"
        )
    return list(splits)


def shape_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    return f"{len(value)} tensors"
