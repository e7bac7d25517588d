"""Where the order of an epoch comes from: our own seeded shuffle, the data set's own order, or the user's sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sized
from typing import Any

import torch

from allhands.comm import broadcast_ints
from allhands.data.order import global_order
from allhands.data.random import derive_seed, preserved_generators, seed_everything
from allhands.errors import UserError
from allhands.world import World


class OrderSource(ABC):
    """The items of an epoch in their global order, the same on every rank. `length` is None when only drawing tells."""

    length: int | None


class IndexSource(OrderSource):
    """An order of single samples."""

    length: int

    @abstractmethod
    def indices(self, epoch: int) -> torch.Tensor:
        """Sample indices of the whole epoch: int64, shape ``[length]``."""


class Sequential(IndexSource):
    """The data set's own order."""

    def __init__(self, length: int) -> None:
        self.length = length

    def indices(self, epoch: int) -> torch.Tensor:
        return torch.arange(self.length)


class Shuffled(IndexSource):
    """A new order each epoch, a function of the seed and the epoch only."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed

    def indices(self, epoch: int) -> torch.Tensor:
        return global_order(self.length, self.seed, epoch)


class Sampled(IndexSource):
    """The user's own sampler, drawn on rank 0 and told to the others, so that all ranks deal from one list."""

    def __init__(self, name: str, sampler: Iterable[int], world: World, seed: int) -> None:
        self.name = name
        self.sampler = sampler
        self.world = world
        self.seed = seed
        self.length = len(sampler) if isinstance(sampler, Sized) else len(self.indices(0))

    def indices(self, epoch: int) -> torch.Tensor:
        drawn = _draw(self.sampler, self.name, self.world, self.seed, epoch)
        if drawn is not None:
            for item in drawn:
                if not _is_int(item):
                    raise UserError(
                        f"the sampler of loader '{self.name}' gave {item!r} ({type(item).__name__}); "
                        "a sampler must give integer indices into the data set"
                    )
            drawn = [int(item) for item in drawn]
        return torch.tensor(broadcast_ints(drawn, self.world), dtype=torch.int64)


class BatchSource(OrderSource):
    """The user's own batch sampler: its batches are kept whole, and dealt out to the ranks like samples."""

    def __init__(self, name: str, sampler: Iterable[list[int]], world: World, seed: int) -> None:
        self.name = name
        self.sampler = sampler
        self.world = world
        self.seed = seed
        self.length = len(sampler) if isinstance(sampler, Sized) else None

    def batches(self, epoch: int) -> list[list[int]]:
        """Lists of sample indices, in the order in which the batch sampler gave them."""
        drawn = _draw(self.sampler, self.name, self.world, self.seed, epoch)
        lengths = flat = None
        if drawn is not None:
            lengths = [len(batch) for batch in drawn]
            flat = [int(index) for batch in drawn for index in batch]
        lengths, flat = broadcast_ints(lengths, self.world), broadcast_ints(flat, self.world)
        parts = torch.tensor(flat, dtype=torch.int64).split(lengths)
        return [part.tolist() for part in parts]


def _draw(sampler: Any, name: str, world: World, seed: int, epoch: int) -> list[Any] | None:
    """One epoch of the sampler on rank 0; None on the others.

    A sampler that draws from the global generators draws the same on every run; one with a generator of its own goes on
    from that generator's state.
    """
    if world.rank != 0:
        return None
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with preserved_generators():
        seed_everything(derive_seed(seed, "sampler", name, epoch))
        return list(sampler)


def _is_int(value: Any) -> bool:
    try:
        return int(value) == value
    except (TypeError, ValueError):
        return False
