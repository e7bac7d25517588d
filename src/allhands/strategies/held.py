"""Which slices of a whole tensor one rank holds, and how the whole is put together from, or dealt
out to, all ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Piece:
    """A block of the whole tensor, and where it lies in the local one.

    Attributes:
        offsets: of the block's first element in the whole tensor, an index a dimension.
        sizes: of the block.
        start: of the block in the local tensor along the first dimension; along the others the
            local tensor is the block.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    def of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """The block, a view of the whole tensor."""
        return whole[tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))]

    def of_local(self, local: torch.Tensor) -> torch.Tensor:
        """The block, a view of the local tensor."""
        return local.narrow(0, self.start, self.sizes[0]) if self.sizes else local


@dataclass(frozen=True)
class Held:
    """One tensor of the plain model or its optimizer, of which this rank holds a part.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        local: this rank's part; None when it has none.
        pieces: what the part consists of; none when it is empty.
        first: of the ranks that hold the same part, this is the one that writes it, and counts it
            in a sum.
        copies: how many ranks hold the same part.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    local: torch.Tensor | None
    pieces: tuple[Piece, ...]
    first: bool
    copies: int

    def with_local(self, local: torch.Tensor) -> Held:
        """The same slices of another tensor of that shape."""
        return dataclasses.replace(self, local=local, dtype=local.dtype)

    def on_stages(self, first: bool, count: int) -> Held:
        """The same of a parameter that `count` stages hold, of which this one is the first or
        not."""
        return dataclasses.replace(self, first=self.first and first, copies=self.copies * count)

    def take(self, whole: torch.Tensor, local: torch.Tensor) -> None:
        """Overwrite a local part with its slices of the whole tensor."""
        for piece in self.pieces:
            piece.of_local(local).copy_(piece.of_whole(whole))

    def whole(self, device: torch.device) -> torch.Tensor:
        """The whole tensor on `device`, on every rank; all ranks call it together."""
        whole = torch.zeros(self.shape, dtype=self.dtype, device=device)
        if self.first and self.local is not None:
            for piece in self.pieces:
                piece.of_whole(whole).copy_(piece.of_local(self.local.detach()))
        # Each element comes from one rank and is 0 on the others, so their bytes add up to it
        # whatever the dtype.
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(whole.reshape(-1).view(torch.uint8))
        return whole


# (what a checkpoint holds in the place of a tensor, where its slices go) -> None
Read = Callable[[Any, Held], None]


def nowhere(shape: Sequence[int], dtype: torch.dtype) -> Held:
    """A tensor of which this rank holds nothing."""
    return Held(tuple(shape), dtype, None, (), False, 1)


def held(
    tensor: torch.Tensor, coordinates: dict[str, tuple[int, int]], order: torch.Tensor | None
) -> Held:
    """How a parameter or buffer on this rank lies in the plain model's.

    Args:
        tensor: a DTensor over axes of the mesh, or a plain tensor, which all ranks of each axis
            hold whole.
        coordinates: of the axes over which it may be sharded or copied: name to (this rank's index,
            number of ranks).
        order: of the rows, where they were reordered before sharding: stored = plain[order].
    """
    placements = _placements(tensor)
    local = tensor if placements is None else tensor._local_tensor  # type: ignore[attr-defined]
    # Where two axes cut the same dimension, tensor parallelism came first, and each of its parts
    # was cut again.
    starts, sizes = [0] * tensor.dim(), list(tensor.shape)
    first, copies = True, 1
    for axis in ("tp", "dp_shard", "dp_replicate"):
        index, count = coordinates.get(axis, (0, 1))
        placement = (placements or {}).get(axis)
        if placement is not None and placement.is_partial():
            raise ValueError(f"a tensor that is a part of a sum over {axis} cannot be stored")
        dim = getattr(placement, "dim", None)
        if dim is None:
            first, copies = first and index == 0, copies * count
            continue
        chunk = -(-sizes[dim] // count)
        begin = min(index * chunk, sizes[dim])
        sizes[dim] = min(chunk, sizes[dim] - begin)
        starts[dim] += begin
    if list(local.shape) != sizes:
        raise ValueError(
            f"a part has the shape {list(local.shape)} and should have {sizes}: {placements}"
        )
    pieces = tuple(_pieces(starts, sizes, order))
    return Held(tuple(tensor.shape), tensor.dtype, local, pieces, first, copies)


def _placements(tensor: torch.Tensor) -> dict[str, Any] | None:
    """By axis, where the tensor is a DTensor."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "placements"):
        return None
    return dict(zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True))  # type: ignore[attr-defined]


def _pieces(
    starts: Sequence[int], sizes: Sequence[int], order: torch.Tensor | None
) -> Iterator[Piece]:
    if not all(sizes):
        return
    if order is None or not sizes:
        yield Piece(tuple(starts), tuple(sizes), 0)
        return
    rows = order[starts[0] : starts[0] + sizes[0]].tolist()
    # Runs of rows that follow one another in the plain tensor too.
    for _, run in itertools.groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        members = list(run)
        yield Piece((members[0][1], *starts[1:]), (len(members), *sizes[1:]), members[0][0])


def dealt(sizes: Sequence[int], ranks: int) -> list[int]:
    """To which rank each item goes: the largest first, each to the rank that has least."""
    owners, loads = [0] * len(sizes), [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners
