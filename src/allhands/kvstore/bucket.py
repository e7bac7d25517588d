"""Keys of one dtype in one 1-D tensor, of which each worker updates one part; and the arithmetic of
a round."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from allhands.comm.flat_layout import FlatLayout
from allhands.errors import UserError
from allhands.kvstore.optimizers import ChunkOptimizer, OptimizerSpec
from allhands.kvstore.placement import KeyPiece


class KeyBucket:
    """Some keys side by side, filled up with zeros to a multiple of the number of parts.

    Args:
        values: the keys' first values, of one dtype.
        group: the optimizer's group of all of them.
        device: where the bucket lies.
        rank: which part is updated here.
        parts: into how many parts it is cut.
        layout: the pieces of each key, and whose they are, where values go in fewer bits; None cuts
            evenly.

    Attributes:
        names: the keys, sorted.
        whole: the weights of all keys, 1-D.
        part: the weights that are updated here, 1-D; with one part, evenly cut, the same memory as
            `whole`.
        views: the weights by key, in the key's shape; the same memory as `whole`.
        optimizer: of `part`; None until the first step.
        number: of the part.
        twin: the same bucket with another part, which is updated here, too; None without one.
    """

    twin: KeyBucket | None = None

    def __init__(
        self,
        values: Mapping[str, torch.Tensor],
        group: int,
        device: torch.device,
        rank: int,
        parts: int,
        layout: Mapping[str, Sequence[KeyPiece]] | None = None,
    ) -> None:
        self.names = sorted(values)
        self.group = group
        self._flat = FlatLayout({name: values[name] for name in self.names})
        count = self._flat.length
        length = -(-count // parts)
        dtype = values[self.names[0]].dtype
        self.layout, self.number, self._length = layout, rank, length
        self.whole = torch.zeros(
            parts * length if layout is None else count, dtype=dtype, device=device
        )
        # In fewer bits, `whole` is what all workers have, and `part` what it should be.
        self.part = self.whole if parts == 1 and layout is None else self.own(self.whole).clone()
        self.views = self.cut(self.whole)
        with torch.no_grad():
            for name, view in self.views.items():
                view.copy_(values[name])
        self.optimizer: ChunkOptimizer | None = None
        self._room: list[torch.Tensor] = []

    def keep_twin(self, number: int) -> None:
        """Update the part of this number here, too."""
        self.twin = twin = copy.copy(self)
        twin.number = number
        twin.part = twin.own(twin.whole).clone()

    @property
    def held(self) -> list[KeyBucket]:
        """This bucket and its twin."""
        return [self] if self.twin is None else [self, self.twin]

    def take_values(self) -> None:
        """Go on from the values in `whole`."""
        for one in self.held:
            one.part.copy_(one.own(one.whole))

    def cut(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a tensor that is as long as the bucket, by key, in the key's shape."""
        return self._flat.named(whole)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor that is as long as the bucket."""
        if self.layout is None:
            return whole[self.number * self._length : (self.number + 1) * self._length]
        mine = [
            whole[offset + piece.start : offset + piece.stop]
            for _, offset, piece in self.pieces(self.number)
        ]
        return torch.cat(mine) if mine else whole.new_empty(0)

    def pieces(self, rank: int | None = None) -> list[tuple[str, int, KeyPiece]]:
        """Those of one rank, or all: the key, where it begins in `whole`, and the piece of it."""
        if self.layout is None:
            return []
        return [
            (place.name, place.start, piece)
            for place in self._flat.places
            for piece in self.layout[place.name]
            if rank in (None, piece.server)
        ]

    def put_together(self, parts: Sequence[torch.Tensor], whole: torch.Tensor) -> None:
        """Fill `whole` with what `own` is on each rank."""
        for rank, part in enumerate(parts):
            used = 0
            for _, offset, piece in self.pieces(rank):
                count = piece.stop - piece.start
                whole[offset + piece.start : offset + piece.stop].copy_(part[used : used + count])
                used += count

    def room(self, number: int) -> torch.Tensor:
        """The n-th tensor as long as the bucket to work in. Kept, because new memory of this size
        costs more than its use."""
        while len(self._room) <= number:
            self._room.append(torch.empty_like(self.whole))
        return self._room[number]

    def filled(self, values: Mapping[str, torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
        """`whole`, overwritten by these values, and by zeros for keys that have none."""
        used = 0
        for name, view in self.cut(whole).items():
            used += view.numel()
            if name in values:
                view.copy_(values[name])
            else:
                view.zero_()
        whole[used:].zero_()
        return whole

    def step(
        self, gradient: torch.Tensor, spec: OptimizerSpec, options: Mapping[str, Any] | None
    ) -> None:
        """Update `part` with its gradient."""
        if self.optimizer is None:
            self.optimizer = ChunkOptimizer(spec, self.group, self.part)
        self.optimizer.step(gradient, options)

    def load(
        self,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        numbers: Mapping[str, float],
        spec: OptimizerSpec,
    ) -> None:
        """Continue from a state: tensors by the state's name, then by key; and numbers."""
        if self.optimizer is None:
            self.optimizer = ChunkOptimizer(spec, self.group, self.part)
        parts = {}
        for name, values in tensors.items():
            dtype = next(iter(values.values())).dtype
            parts[name] = self.own(self.filled(values, torch.empty_like(self.whole, dtype=dtype)))
        self.optimizer.load_state(parts, numbers)
        if self.twin is not None:
            self.twin.load(tensors, numbers, spec)


def weight_factor(weights: Sequence[float], expected: float | None) -> float:
    """By what the sum of the gradients is multiplied."""
    if expected is None:
        return 1.0
    total = sum(weights)
    if total == 0:
        raise UserError(
            "no worker has a sample in this step: step(0) on all workers; leave the step out on "
            "all of them"
        )
    return expected / total
