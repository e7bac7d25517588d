"""One chunk of a key on a server: its value, its optimizer, and the round that is open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from allhands.comm.clipping import square_of
from allhands.comm.codecs import Codec
from allhands.errors import UserError
from allhands.kvstore.bucket import weight_factor
from allhands.kvstore.chunk_compression import ChunkCompressor
from allhands.kvstore.optimizers import ChunkOptimizer, OptimizerSpec


class ChunkWorker(Protocol):
    """A worker's session, as far as chunks need it."""

    rank: int
    occasion: str

    def tell(self, fields: dict[str, Any]) -> None:
        """A control message."""

    def give(self, chunk: Chunk) -> None:
        """Send the chunk's value; called with the chunk's lock held."""

    def finished(self, meta: Meta, workers: int, staleness: int) -> None:
        """A chunk of this step is done."""


@dataclass
class Meta:
    """One worker's part in a step, as it announced it.

    Attributes:
        step: the worker's number of the step.
        chunks: how many chunks of this server it pushes.
        idle: it has no samples, and leaves the options to the others.
        left: how many of them are not done.
        staleness: the largest of them.
    """

    worker: ChunkWorker
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


@dataclass
class Chunk:
    """Numbers `start` to `stop` of a key.

    Attributes:
        weights: the value, 1-D.
        version: rounds that were applied (in async: pushes).
        trained: it is of the keys that every step is over.
        ready: whether rank 0 has given the first value.
        arrived: pushes of the open round that are not added yet, because a lower rank's is to come
            first.
        added: who is in the sum.
        total: the sum so far; the first one's own memory.
        room: where the sum is made instead, while `total` is a worker's own memory, which must stay
            as it is.
        waiting: who wants the value, and from which version on.
        last: the last round that each worker pushed, to know a repetition.
        seen: the version that each worker got last, and its own pushes since.
        clocks: how often each worker has pushed, where nobody waits for all.
        outside: how often the value was set by no round.
        square: of the round that is open or was closed last, where it is clipped: the sum of
            squares.
        workers: how many were in the round that was closed last.
    """

    number: int
    key: str
    start: int
    stop: int
    group: int
    weights: torch.Tensor
    version: int = 0
    ready: bool = False
    trained: bool = False
    block: int = -1
    offset: int = 0
    lock: Any = field(default_factory=threading.RLock)
    optimizer: ChunkOptimizer | None = None
    arrived: dict[int, tuple[torch.Tensor, Meta, Callable[[], None], torch.Tensor | None]] = field(
        default_factory=dict
    )
    added: list[Meta] = field(default_factory=list)
    total: torch.Tensor | None = None
    room: torch.Tensor | None = None
    held: list[Callable[[], None]] = field(default_factory=list)
    waiting: list[tuple[ChunkWorker, int]] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)
    outside: int = 0
    square: float | None = None
    workers: int = 0
    down: ChunkCompressor | None = None
    # What the workers have, where values are compressed on their way down.
    sent: torch.Tensor | None = None
    encoded: torch.Tensor | None = None
    clipped: bool = False  # combined, and waiting for the norm of all chunks

    def set_optimizer(self, spec: OptimizerSpec | None) -> None:
        """Take steps with this optimizer from now on, from its first state."""
        self.optimizer = None if spec is None else ChunkOptimizer(spec, self.group, self.weights)

    def compress_down(self, codec: Codec) -> None:
        """Send changes of the value in fewer bits from now on."""
        self.down = ChunkCompressor(codec, len(self.weights))
        self.sent = self.weights.clone()

    def take(
        self,
        rank: int,
        values: torch.Tensor,
        meta: Meta,
        release: Callable[[], None],
        room: torch.Tensor | None = None,
    ) -> None:
        """Keep a push of the open round until it is to be added. The lock is held."""
        if rank in self.arrived or any(other.worker.rank == rank for other in self.added):
            release()
            raise UserError(
                f"the key '{self.key}' was pushed twice in one round by worker {rank}; pull it "
                "before the next push"
            )
        self.arrived[rank] = (values, meta, release, room)

    def forget(self, rank: int) -> None:
        """Drop a worker's push that is not to be added. The lock is held."""
        if rank in self.arrived:
            self.arrived.pop(rank)[2]()

    def add_up(self, awaited: Collection[int], ready: Collection[int], settled: bool) -> bool:
        """Add what is its turn, in the order of the ranks; True when all are in. The lock is held.

        Args:
            awaited: the ranks that are waited for.
            ready: those that may be added.
            settled: nobody but them comes into the round.
        """
        while not self.clipped:
            done = {meta.worker.rank for meta in self.added}
            due = min({*awaited, *ready} - done, default=None)
            if due is None or due not in ready or due not in self.arrived:
                break
            values, meta, release, room = self.arrived.pop(due)
            if self.total is None:
                self.total, self.room = values, room
                self.held.append(release)
            elif (
                self.optimizer is None
                and settled
                and done | {due} == set(ready)
                and self.down is None
            ):
                # The sum is the new value: no worker reads the old one any more, as all have
                # pushed.
                self.total, self.room = torch.add(self.total, values, out=self.weights), None
                release()
            else:
                self.total = torch.add(self.total, values, out=self._writable())
                release()
            self.added.append(meta)
        return (
            settled and not self.clipped and {meta.worker.rank for meta in self.added} == set(ready)
        )

    def _writable(self) -> torch.Tensor:
        """Where the sum, changed, is to be written."""
        assert self.total is not None
        room, self.room = self.room, None
        return self.total if room is None else room

    def combine(self) -> float:
        """Weigh the sum; returns the sum of its squares where the step is clipped, else 0. The lock
        is held."""
        assert self.total is not None
        lead = self.lead()
        others = {meta.expected for meta in self.added if not meta.idle}
        if len(others) > 1:
            raise UserError(
                f"the key '{self.key}' was pushed with a weight by some workers and without by "
                "others"
            )
        factor = weight_factor([meta.weight for meta in self.added], lead.expected)
        if factor != 1.0:
            self.total = torch.mul(self.total, factor, out=self._writable())
        self.square = square_of(self.total) if lead.clip is not None else None
        return self.square or 0.0

    def lead(self) -> Meta:
        """Whose options count."""
        return lead_of(self.added)

    def close(self, scale: float = 1.0, mirror: Any = None) -> list[Meta]:
        """Apply the sum and open the next round; who was in it. Nobody hears of it before `mirror`
        has it. The lock is held."""
        assert self.total is not None
        if scale != 1.0:
            self.total = torch.mul(self.total, scale, out=self._writable())
        metas, options = self.added, self.lead().options(self.group)
        ticket = None if mirror is None else mirror.begin(self, options, len(metas))
        try:
            self.apply(options)
        finally:
            self.clear()
        self.version += 1
        for meta in metas:
            self.last[meta.worker.rank] = self.version
        self.workers = len(metas)
        self._encode()
        if mirror is not None:
            mirror.settle(self, ticket)
        self.serve()
        return metas

    def repeat(
        self,
        total: torch.Tensor,
        options: dict[str, Any] | None,
        workers: int,
        square: float | None,
    ) -> None:
        """Apply a round that was closed elsewhere."""
        self.total = total
        try:
            self.apply(options)
        finally:
            self.clear()
        self.version += 1
        self.workers, self.square = workers, square
        self._encode()

    def apply(self, options: dict[str, Any] | None) -> None:
        """Take a step with the sum, or the sum itself where there is no optimizer. The lock is
        held."""
        assert self.total is not None
        if self.optimizer is not None:
            if self.room is not None:  # an optimizer may write to its gradient
                self.total = self._writable().copy_(self.total)
            self.optimizer.step(self.total, options)
        elif self.total is not self.weights:
            self.weights.copy_(self.total)

    def has_begun(self, number: int) -> bool:
        """Whether it is too late to be counted from this round on. The lock is held."""
        return self.version + 1 > number or (self.version + 1 == number and bool(self.added))

    def clear(self) -> None:
        """Forget the open round."""
        for release in self.held:
            release()
        self.total, self.room, self.added, self.held, self.clipped = None, None, [], [], False

    def drop(self) -> None:
        """Forget the open round and what has arrived for it."""
        self.clear()
        for _, _, release, _ in self.arrived.values():
            release()
        self.arrived.clear()
        self.waiting.clear()
        self.clocks.clear()

    def _encode(self) -> None:
        """Say in few bits what has changed, where workers get it so. The lock is held."""
        if self.down is not None:
            assert self.sent is not None
            self.encoded = self.down.compress(
                self.weights - self.sent if self.optimizer is not None else self.weights, self.key
            )
            moved = torch.empty_like(self.sent)
            self.down.codec.decode(self.encoded, moved)
            if self.optimizer is not None:
                # The residual is what `sent` lacks already: it must not be counted twice.
                self.down.load(torch.zeros_like(moved))
                self.sent.add_(moved)
            else:
                self.sent = moved

    def changed_outside(self) -> None:
        """The value was set, and not by a round: workers that get compressed changes get it whole
        next time."""
        self.outside += 1
        if self.down is not None:
            self.sent, self.encoded = self.weights.clone(), None
            self.down.load(torch.zeros(len(self.weights)))

    def serve(self, may: Collection[int] | None = None) -> None:
        """Answer those whose version is reached, and who are among `may`. The lock is held."""
        waiting, self.waiting = self.waiting, []
        due = []
        for worker, version in waiting:
            if version <= self.version and (may is None or worker.rank in may):
                due.append(worker)
            else:
                self.waiting.append((worker, version))
        for worker in due:
            self.seen[worker.rank] = self.version
            worker.give(self)
