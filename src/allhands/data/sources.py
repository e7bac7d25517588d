"""Where the order of an epoch comes from: our own seeded shuffle, the data set's own order, or the
user's sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from allhands.comm import broadcast_ints
from allhands.data.epochs import EpochListeners
from allhands.data.order import global_order
from allhands.data.random import derive_seed, preserved_generators, seed_everything
from allhands.errors import UserError
from allhands.world import World


class OrderSource(ABC):
    """The items of an epoch in their global order, the same on every rank. `length` is None when
    only drawing tells."""

    length: int | None

    def state_dict(self, within_epoch: bool) -> dict[str, Any]:
        """What the user's sampler needs to go on, see `Feed.state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""


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


class _Drawing:
    """The user's own sampler or batch sampler: drawn on rank 0, whose order all ranks deal from.

    A sampler that draws from the global generators draws the same on every run. One with a
    generator of its own goes on from that generator's state, which a checkpoint therefore holds.
    """

    def __init__(self, name: str, sampler: Any, world: World, seed: int) -> None:
        self.name = name
        self.sampler = sampler
        self.world = world
        self.seed = seed
        self.listeners = EpochListeners(sampler)
        self.epoch: int | None = None
        self.drawn: list[Any] = []

    def draw(self, epoch: int) -> list[Any] | None:
        """One epoch of the sampler on rank 0; None on the others."""
        if self.world.rank != 0:
            return None
        if self.epoch != epoch:
            self.listeners.set_epoch(epoch)
            with preserved_generators():
                seed_everything(derive_seed(self.seed, "sampler", self.name, epoch))
                self.drawn = list(self.sampler)
            self.epoch = epoch
        return self.drawn

    def forget(self) -> None:
        """Draw anew when the same epoch is asked for again."""
        self.epoch = None

    def _parts(self) -> Iterator[Any]:
        """The sampler, and the one that a batch sampler draws from."""
        yield self.sampler
        if hasattr(self.sampler, "sampler"):
            yield self.sampler.sampler

    def _generator(self) -> torch.Generator | None:
        generators = (getattr(part, "generator", None) for part in self._parts())
        return next(
            (generator for generator in generators if isinstance(generator, torch.Generator)), None
        )

    def _stateful(self) -> Any:
        for part in self._parts():
            if callable(getattr(part, "state_dict", None)) and callable(
                getattr(part, "load_state_dict", None)
            ):
                return part
        return None

    def state_dict(self) -> dict[str, Any]:
        generator, stateful = self._generator(), self._stateful()
        return {
            "generator": generator.get_state() if generator is not None else None,
            "sampler": stateful.state_dict() if stateful is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        generator, stateful = self._generator(), self._stateful()
        if generator is not None and state["generator"] is not None:
            generator.set_state(state["generator"])
        if stateful is not None and state["sampler"] is not None:
            stateful.load_state_dict(state["sampler"])


class Sampled(IndexSource):
    """The order that the user's own sampler gives."""

    def __init__(self, name: str, sampler: Iterable[int], world: World, seed: int) -> None:
        self.name = name
        self.world = world
        self.drawing = _Drawing(name, sampler, world, seed)
        if isinstance(sampler, Sized):
            self.length = len(sampler)
        else:
            self.length = len(self.indices(0))
            self.drawing.forget()

    def indices(self, epoch: int) -> torch.Tensor:
        drawn = self.drawing.draw(epoch)
        if drawn is not None:
            for item in drawn:
                if not _is_int(item):
                    raise UserError(
                        f"the sampler of loader '{self.name}' gave {item!r} "
                        f"({type(item).__name__}); "
                        "a sampler must give integer indices into the data set"
                    )
            drawn = [int(item) for item in drawn]
        return torch.tensor(broadcast_ints(drawn, self.world), dtype=torch.int64)

    def state_dict(self, within_epoch: bool) -> dict[str, Any]:
        state = self.drawing.state_dict()
        if within_epoch and self.drawing.epoch is not None:
            state |= {
                "epoch": self.drawing.epoch,
                "order": torch.tensor([int(item) for item in self.drawing.drawn]),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawing.load_state_dict(state)
        if "order" in state:
            self.drawing.epoch, self.drawing.drawn = state["epoch"], state["order"].tolist()


class BatchSource(OrderSource):
    """The user's own batch sampler: its batches are kept whole, and dealt out to the ranks like
    samples."""

    def __init__(self, name: str, sampler: Iterable[list[int]], world: World, seed: int) -> None:
        self.world = world
        self.drawing = _Drawing(name, sampler, world, seed)
        self.length = len(sampler) if isinstance(sampler, Sized) else None

    def batches(self, epoch: int) -> list[list[int]]:
        """Lists of sample indices, in the order in which the batch sampler gave them."""
        drawn = self.drawing.draw(epoch)
        lengths, flat = (None, None) if drawn is None else _flat(drawn)
        lengths, flat = broadcast_ints(lengths, self.world), broadcast_ints(flat, self.world)
        return _unflat(lengths, flat)

    def state_dict(self, within_epoch: bool) -> dict[str, Any]:
        state = self.drawing.state_dict()
        if within_epoch and self.drawing.epoch is not None:
            lengths, flat = _flat(self.drawing.drawn)
            state |= {
                "epoch": self.drawing.epoch,
                "lengths": torch.tensor(lengths),
                "order": torch.tensor(flat),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawing.load_state_dict(state)
        if "order" in state:
            self.drawing.epoch = state["epoch"]
            self.drawing.drawn = _unflat(state["lengths"].tolist(), state["order"].tolist())


def _flat(batches: list[Any]) -> tuple[list[int], list[int]]:
    return [len(batch) for batch in batches], [int(index) for batch in batches for index in batch]


def _unflat(lengths: list[int], flat: list[int]) -> list[list[int]]:
    return [part.tolist() for part in torch.tensor(flat, dtype=torch.int64).split(lengths)]


def _is_int(value: Any) -> bool:
    try:
        return int(value) == value
    except (TypeError, ValueError):
        return False
