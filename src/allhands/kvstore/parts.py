"""What a server has of one key, dense or of rows: the state that can be taken and given, and the
workers' steps."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from allhands.errors import UserError
from allhands.kvstore.bucket import weight_factor
from allhands.kvstore.optimizers import OptimizerSpec


class StepWorker(Protocol):
    """A worker's session, as far as parts need it."""

    rank: int
    occasion: str

    def tell(self, fields: dict[str, Any]) -> None:
        """A control message."""

    def give(self, chunk: Any) -> None:
        """Send the chunk's value; called with the chunk's lock held."""

    def give_rows(self, request: int, rows: torch.Tensor) -> None:
        """The rows that a request asked for."""

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
        arrived: pushes of the open round that are not added yet.
        added: who is in the sum.
        clipped: the round is combined, and waits for the norm of all parts.
        early: pushes of rounds after the open one, of which `beyond` may be, as `Shard.push` takes
            them.
        waiting: who wants the value, from which version on, and what of it.
    """

    trained = False
    beyond = 0

    def __init__(self, number: int, key: str, group: int) -> None:
        self.number, self.key, self.group = number, key, group
        self.lock = threading.RLock()
        self.version = self.outside = self.workers = 0
        self.last: dict[int, int] = {}
        self.clocks: dict[int, int] = {}
        self.square: float | None = None
        self.ready, self.clipped = True, False
        self.arrived: dict[int, tuple[Any, Meta, Callable[[], None], torch.Tensor | None]] = {}
        self.added: list[Meta] = []
        self.early: dict[int, tuple[Any, ...]] = {}
        self.waiting: list[tuple[StepWorker, int, Any]] = []

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
    def newest(self, synchronous: bool) -> int:
        """The highest number that a push has had here."""

    @abstractmethod
    def has_begun(self, number: int) -> bool:
        """Whether it is too late to be counted from this round on. The lock is held."""

    # ------------------------------------------- a round; the lock is held in all of it

    @abstractmethod
    def add_up(self, awaited: Collection[int], ready: Collection[int], settled: bool) -> bool:
        """Add what can be, in the order of the ranks; True when all are in.

        Args:
            awaited: the ranks that are waited for.
            ready: those that may be added.
            settled: nobody but them comes into the round.
        """

    @abstractmethod
    def combine(self) -> float:
        """Weigh the sum; returns the sum of its squares where the step is clipped, else 0."""

    @abstractmethod
    def multiply(self, factor: float) -> None:
        """Multiply the sum."""

    @abstractmethod
    def payload(self) -> torch.Tensor | bytes:
        """The sum, as it is sent to a copy."""

    @abstractmethod
    def set_payload(self, payload: Any) -> None:
        """Take a sum that `payload` gave on another server."""

    @abstractmethod
    def apply(self, options: dict[str, Any] | None) -> None:
        """Take a step with the sum, or assign it where there is no optimizer."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the sum, and who is in it."""

    @abstractmethod
    def give(self, worker: StepWorker, asked: Any) -> None:
        """Send a worker what it waits for."""

    def encode(self) -> None:
        """After a round: make what all workers get alike."""

    def stale(self, rank: int) -> int:
        """How many pushes of others the worker has not seen."""
        return 0

    def skip(self) -> None:
        """A worker without samples has pushed, where nobody waits: nothing becomes stale."""

    def take(
        self,
        rank: int,
        values: Any,
        meta: Meta,
        release: Callable[[], None],
        room: torch.Tensor | None = None,
    ) -> None:
        """Keep a push of the open round until it is to be added."""
        if rank in self.arrived or any(other.worker.rank == rank for other in self.added):
            release()
            raise UserError(
                f"the key '{self.key}' was pushed twice in one round by worker {rank}; pull it "
                "before the next push"
            )
        self.arrived[rank] = (values, meta, release, room)

    def forget(self, rank: int) -> None:
        """Drop a worker's push that is not to be added."""
        if rank in self.arrived:
            self.arrived.pop(rank)[2]()

    def lead(self) -> Meta:
        """Whose options count."""
        return lead_of(self.added)

    def factor(self) -> float:
        """By what the sum is multiplied."""
        if len({meta.expected for meta in self.added if not meta.idle}) > 1:
            raise UserError(
                f"the key '{self.key}' was pushed with a weight by some workers and without by "
                "others"
            )
        try:
            return weight_factor([meta.weight for meta in self.added], self.lead().expected)
        except UserError as error:
            raise UserError(f"the key '{self.key}': {error}") from None

    def close(self, scale: float = 1.0, mirror: Any = None) -> list[Meta]:
        """Apply the sum and open the next round; who was in it. Nobody hears of it before `mirror`
        has it."""
        if scale != 1.0:
            self.multiply(scale)
        metas, options, ticket = self.added, self.lead().options(self.group), None
        if mirror is not None:
            ticket = mirror.begin(self, options, len(metas))
        self._step(options)
        for meta in metas:
            self.last[meta.worker.rank] = self.version
        self.workers = len(metas)
        self.encode()
        if mirror is not None:
            mirror.settle(self, ticket)
        self.serve()
        return metas

    def repeat(self, payload: Any, said: Mapping[str, Any]) -> None:
        """Apply a round that was closed on another server, as `Mirror.begin` sends it."""
        self.set_payload(payload)
        self._step(said["options"])
        self.workers, self.square = said["workers"], said["square"]
        self.encode()

    def step_alone(
        self,
        meta: Meta,
        values: Any,
        release: Callable[[], None],
        room: torch.Tensor | None,
        options: dict[str, Any] | None,
    ) -> None:
        """Apply one worker's push by itself."""
        alone = (meta.worker.rank,)
        self.take(meta.worker.rank, values, meta, release, room)
        self.add_up(alone, alone, True)
        try:
            self.combine()
        except UserError:
            self.clear()
            raise
        self._step(options)

    def _step(self, options: dict[str, Any] | None) -> None:
        try:
            self.apply(options)
        finally:
            self.clear()
        self.version += 1

    def serve(self, may: Collection[int] | None = None) -> None:
        """Answer those whose version is reached, and who are among `may`."""
        waiting, self.waiting = self.waiting, []
        due: list[tuple[StepWorker, int, Any]] = []
        for one in waiting:
            may_have = one[1] <= self.version and (may is None or one[0].rank in may)
            (due if may_have else self.waiting).append(one)
        for worker, _, asked in due:
            self.give(worker, asked)

    def drop(self) -> None:
        """Forget the open round, what has arrived for it, and who waits."""
        self.clear()
        for _, _, release, _ in self.arrived.values():
            release()
        for one in (self.arrived, self.early, self.waiting, self.clocks):
            one.clear()

    # ------------------------------------------------------------------ all of it

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
