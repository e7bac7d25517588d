"""What a server has of one key, dense or of rows: the state that can be taken and given, and the
workers' steps."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from allhands.kvstore.optimizers import OptimizerSpec


class StepWorker(Protocol):
    """A worker's session, as far as parts need it."""

    rank: int
    occasion: str

    def tell(self, fields: dict[str, Any]) -> None:
        """A control message."""

    def give(self, chunk: Any) -> None:
        """Send the chunk's value; called with the chunk's lock held."""

    def finished(self, meta: Meta, workers: int, staleness: int) -> None:
        """A part of this step is done."""


@dataclass
class Meta:
    """One worker's part in a step, as it announced it.

    Attributes:
        step: the worker's number of the step.
        chunks: how many parts of this server it pushes.
        idle: it has no samples, and leaves the options to the others.
        left: how many of them are not done.
        staleness: the largest of them.
    """

    worker: StepWorker
    step: int
    weight: float
    expected: float | None
    groups: list[dict[str, Any]] | None
    clip: float | None
    chunks: int
    idle: bool = False
    left: int = 0
    staleness: int = 0
    workers: int = 0

    def options(self, group: int) -> dict[str, Any] | None:
        """The optimizer's numbers of a group in this step."""
        return self.groups[group] if self.groups else None


def lead_of(metas: Sequence[Meta]) -> Meta:
    """Whose options count in a round: all workers that are not idle have the same."""
    return next((meta for meta in metas if not meta.idle), metas[0])


def within(clocks: Mapping[int, int], live: Collection[int], staleness: int) -> set[int]:
    """The ranks of `live` that are at most `staleness` ahead of the slowest of them."""
    slowest = min((clocks.get(rank, 0) for rank in live), default=0)
    return {rank for rank in live if clocks.get(rank, 0) - slowest <= staleness}


class KeyPart(ABC):
    """A part of one key on one server: numbers of a dense key, or rows.

    Args:
        number: of the part in the whole job; a table of rows has one number on all servers.
        key: its name.
        group: the optimizer's group.

    Attributes:
        version: rounds that were applied (in async: pushes).
        last: the last round that each worker pushed, to know a repetition.
        clocks: how often each worker has pushed, where nobody waits for all.
        outside: how often the value was set by no round.
        square: of the round that is open or was closed last, where it is clipped: the sum of
            squares.
        workers: how many were in the round that was closed last.
        ready: whether the first value is there.
        trained: it is of the keys that every step is over.
    """

    trained = False

    def __init__(self, number: int, key: str, group: int) -> None:
        self.number, self.key, self.group = number, key, group
        self.lock = threading.RLock()
        self.version = self.outside = self.workers = 0
        self.last: dict[int, int] = {}
        self.clocks: dict[int, int] = {}
        self.square: float | None = None
        self.ready = True

    @abstractmethod
    def form(self) -> list[Any]:
        """What `ShardKeys.create` makes it of."""

    @abstractmethod
    def set_optimizer(self, spec: OptimizerSpec | None) -> None:
        """Take steps with this optimizer from now on, from its first state."""

    @abstractmethod
    def options(self) -> dict[str, Any] | None:
        """The numbers of the optimizer's group as they are now."""

    @abstractmethod
    def set_options(self, options: dict[str, Any]) -> None:
        """Go on with numbers that `options` gave."""

    @abstractmethod
    def state(self, whole: bool) -> dict[str, torch.Tensor]:
        """Copies of the optimizer's states, numbers as float64 of shape []; of rows also these.
        `whole`: and all else that the part goes on from. The lock is held."""

    @abstractmethod
    def load(self, states: dict[str, torch.Tensor]) -> None:
        """Continue from what `state` gave. The lock is held.

        Raises:
            UserError: it is of another optimizer, or of another form.
        """

    @abstractmethod
    def repeat(self, payload: Any, said: Mapping[str, Any]) -> None:
        """Apply a round that was closed on another server, as `Mirror.begin` sends it."""

    @abstractmethod
    def newest(self, synchronous: bool) -> int:
        """The highest number that a push has had here."""

    @abstractmethod
    def has_begun(self, number: int) -> bool:
        """Whether it is too late to be counted from this round on. The lock is held."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the open round, what has arrived for it, and who waits. The lock is held."""

    def changed_outside(self) -> None:
        """The value was set, and not by a round. The lock is held."""
        self.outside += 1

    def copies(self, whole: bool) -> dict[str, torch.Tensor]:
        """`state` by ``number\\tname``."""
        with self.lock:
            return {f"{self.number}\t{name}": one for name, one in self.state(whole).items()}

    def whole(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """All of it between two rounds: what is no tensor, and copies of the tensors."""
        with self.lock:
            fields = {
                "part": self.number,
                "version": self.version,
                "ready": self.ready,
                "square": self.square,
                "workers": self.workers,
                "options": self.options(),
            }
            return fields, self.copies(True)

    def load_whole(self, fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `whole` gave; tensors of other parts are left."""
        with self.lock:
            if fields["options"] is not None:
                self.set_options(fields["options"])
            self.load(by_part(tensors)[self.number])
            self.version, self.ready = fields["version"], fields["ready"]
            self.square, self.workers = fields["square"], fields["workers"]
            self.last.clear()


def by_part(tensors: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """Tensors of `KeyPart.copies`, by the part's number and then by name."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        number, what = name.split("\t")
        found.setdefault(int(number), {})[what] = value
    return found
