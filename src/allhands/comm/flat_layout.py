"""Flat layouts: tensors that lie one after another in one vector, so that one operation is over all
of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """One tensor in a vector: numbers ``start`` to ``stop``, in `shape` and, if it is not None,
    with `stride`."""

    name: str
    start: int
    stop: int
    shape: torch.Size
    stride: tuple[int, ...] | None = None


class FlatLayout:
    """The places of tensors in a vector.

    Args:
        tensors: by name, in their order; their shapes are taken, and not their numbers.
        align: every tensor begins at a multiple of so many numbers.
        start: where the first one begins.
        strided: keep the tensors' memory formats (channels last); else views are contiguous.

    Attributes:
        places: in the order of the vector.
        length: where the next tensor would begin: numbers in the vector, `start` and gaps included.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        align: int = 1,
        start: int = 0,
        strided: bool = False,
    ) -> None:
        self.places: list[Place] = []
        for name, tensor in tensors.items():
            # The strides of a new tensor of this form: those of a slice would leave gaps.
            stride = torch.empty_like(tensor, device="meta").stride() if strided else None
            self.places.append(Place(name, start, start + tensor.numel(), tensor.shape, stride))
            start = -(-(start + tensor.numel()) // align) * align
        self.length = start
        # Without gaps, one split is faster than a slice for each tensor.
        plain = (
            not strided
            and bool(self.places)
            and self.length == sum(place.shape.numel() for place in self.places)
        )
        self._sizes = [place.shape.numel() for place in self.places] if plain else None

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor as a view of a vector, whose first `length` numbers are those of the
        layout."""
        if self._sizes is None:
            return [_view(flat, place) for place in self.places]
        parts = flat[: self.length].split(self._sizes)
        return [part.view(place.shape) for part, place in zip(parts, self.places, strict=True)]

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {place.name: view for place, view in zip(self.places, self.views(flat), strict=True)}

    def write(self, flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
        """Copy a vector into tensors, which are given in the layout's order."""
        with torch.no_grad():
            for tensor, view in zip(tensors, self.views(flat), strict=True):
                tensor.copy_(view)


def joined(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy of tensors one after another, as one vector.

    Args:
        tensors: at least one; of one dtype, or `dtype` says which.
        dtype: of the vector; None: of the tensors.
    """
    return torch.cat([tensor.detach().reshape(-1).to(dtype or tensor.dtype) for tensor in tensors])


def fused(values: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """One vector for each dtype of tensors; what is done to it before the next one is copied back
    into them."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for value in values:
        groups.setdefault(value.dtype, []).append(value.detach())
    for group in groups.values():
        flat = joined(group)
        yield flat
        for value, part in zip(group, flat.split([value.numel() for value in group]), strict=True):
            value.copy_(part.view_as(value))


def _view(flat: torch.Tensor, place: Place) -> torch.Tensor:
    if place.stride is not None:
        return flat.as_strided(place.shape, place.stride, flat.storage_offset() + place.start)
    return flat[place.start : place.stop].view(place.shape)
