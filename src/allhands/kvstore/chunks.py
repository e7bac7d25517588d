"""One chunk of a key on a server: its value, its optimizer, and the round that is open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from allhands.comm.clipping import square_of
from allhands.comm.codecs import Codec
from allhands.errors import UserError
from allhands.kvstore.bucket import weight_factor
from allhands.kvstore.chunk_compression import ChunkCompressor
from allhands.kvstore.optimizers import ChunkOptimizer, OptimizerSpec
from allhands.kvstore.parts import KeyPart, Meta, StepWorker, lead_of

_WEIGHTS, _SENT, _RESIDUAL = "weights", "sent", "residual"
ANEW = "anew"  # the chunk's optimizer is to have its first state


class Chunk(KeyPart):
    """Numbers `start` to `stop` of a key.

    Attributes:
        weights: the value, 1-D.
        arrived: pushes of the open round that are not added yet, because a lower rank's is to come
            first.
        added: who is in the sum.
        total: the sum so far; the first one's own memory.
        room: where the sum is made instead, while `total` is a worker's own memory, which must stay
            as it is.
        waiting: who wants the value, and from which version on.
        seen: the version that each worker got last, and its own pushes since.
        down: where values are compressed on their way down; then `sent` is what the workers have.
        clipped: the round is combined, and waits for the norm of all parts.
    """

    def __init__(
        self,
        number: int,
        key: str,
        start: int,
        stop: int,
        group: int,
        weights: torch.Tensor,
        block: int = -1,
        offset: int = 0,
    ) -> None:
        super().__init__(number, key, group)
        self.start, self.stop, self.weights = start, stop, weights
        self.block, self.offset = block, offset
        self.ready = False
        self.optimizer: ChunkOptimizer | None = None
        self.arrived: dict[
            int, tuple[torch.Tensor, Meta, Callable[[], None], torch.Tensor | None]
        ] = {}
        self.added: list[Meta] = []
        self.total: torch.Tensor | None = None
        self.room: torch.Tensor | None = None
        self.held: list[Callable[[], None]] = []
        self.waiting: list[tuple[StepWorker, int]] = []
        self.seen: dict[int, int] = {}
        self.down: ChunkCompressor | None = None
        self.sent: torch.Tensor | None = None
        self.encoded: torch.Tensor | None = None
        self.clipped = False

    # ------------------------------------------------------------------ its state

    def form(self) -> list[Any]:
        dtype = str(self.weights.dtype).removeprefix("torch.")
        return [self.number, self.key, self.group, dtype, self.start, self.stop, self.trained]

    def set_optimizer(self, spec: OptimizerSpec | None) -> None:
        self.optimizer = None if spec is None else ChunkOptimizer(spec, self.group, self.weights)

    def options(self) -> dict[str, Any] | None:
        return None if self.optimizer is None else self.optimizer.options()

    def set_options(self, options: dict[str, Any]) -> None:
        if self.optimizer is not None:
            self.optimizer.set_options(options)

    def state(self, whole: bool) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if self.optimizer is not None:
            tensors, numbers = self.optimizer.state()
            found |= {name: value.detach().clone() for name, value in tensors.items()}
            found |= {
                name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()
            }
        if whole:
            found[_WEIGHTS] = self.weights.clone()
            if self.down is not None:
                assert self.sent is not None
                found |= {_SENT: self.sent.clone(), _RESIDUAL: self.down.state().clone()}
        return found

    def load(self, states: dict[str, torch.Tensor]) -> None:
        weights, sent, residual = (states.pop(name, None) for name in (_WEIGHTS, _SENT, _RESIDUAL))
        if states.pop(ANEW, None) is not None:
            states.clear()
        if weights is not None:
            self.weights.copy_(weights)
        if states and self.optimizer is None:
            raise UserError(
                "there is no optimizer whose state this could be; call set_optimizer first"
            )
        if self.optimizer is not None:
            self.optimizer.load_state(
                {name: value for name, value in states.items() if value.dim()},
                {name: float(value) for name, value in states.items() if not value.dim()},
            )
        self.changed_outside()
        if self.down is not None and sent is not None and residual is not None:
            self.sent = sent.clone()
            self.down.load(residual)

    def load_whole(self, fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().load_whole(fields, tensors)
        self.seen.clear()

    def compress_down(self, codec: Codec) -> None:
        """Send changes of the value in fewer bits from now on."""
        self.down = ChunkCompressor(codec, len(self.weights))
        self.sent = self.weights.clone()

    # ------------------------------------------------------------------ the open round

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
        ticket = None if mirror is None else mirror.begin(self, options, len(metas), self.total)
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

    def step_alone(
        self,
        meta: Meta,
        values: torch.Tensor,
        release: Callable[[], None],
        room: torch.Tensor | None,
        options: dict[str, Any] | None,
    ) -> None:
        """Apply one worker's push by itself. The lock is held."""
        self.added, self.total, self.held, self.room = [meta], values, [release], room
        try:
            self.combine()
            self.apply(options)
        finally:
            self.clear()
        self.version += 1
        self.seen[meta.worker.rank] += 1

    def repeat(self, payload: torch.Tensor, said: Mapping[str, Any]) -> None:
        self.total = payload.view(self.weights.dtype)
        try:
            self.apply(said["options"])
        finally:
            self.clear()
        self.version += 1
        self.workers, self.square = said["workers"], said["square"]
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

    def newest(self, synchronous: bool) -> int:
        return self.version

    def has_begun(self, number: int) -> bool:
        return self.version + 1 > number or (self.version + 1 == number and bool(self.added))

    def clear(self) -> None:
        """Forget the open round."""
        for release in self.held:
            release()
        self.total, self.room, self.added, self.held, self.clipped = None, None, [], [], False

    def drop(self) -> None:
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
        """Workers that get compressed changes get the value whole next time."""
        super().changed_outside()
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
