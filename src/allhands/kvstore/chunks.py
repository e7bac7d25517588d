"""One chunk of a key on a server: its value, its optimizer, and the round that is open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from allhands.comm.clipping import square_of
from allhands.comm.codecs import Codec
from allhands.errors import UserError
from allhands.kvstore.chunk_compression import ChunkCompressor, take_values
from allhands.kvstore.optimizers import ChunkOptimizer, OptimizerSpec
from allhands.kvstore.parts import KeyPart, Meta, StepWorker

_WEIGHTS, _SENT, _RESIDUAL = "weights", "sent", "residual"
ANEW = "anew"  # the chunk's optimizer is to have its first state


class Chunk(KeyPart):
    """Numbers `start` to `stop` of a key.

    Attributes:
        weights: the value, 1-D.
        total: the sum so far; the first one's own memory.
        room: where the sum is made instead, while `total` is a worker's own memory, which must stay
            as it is.
        seen: the version that each worker got last, and its own pushes since.
        down: where values are compressed on their way down; then `sent` is what the workers have.
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
        self.total: torch.Tensor | None = None
        self.room: torch.Tensor | None = None
        self.held: list[Callable[[], None]] = []
        self.seen: dict[int, int] = {}
        self.down: ChunkCompressor | None = None
        self.sent: torch.Tensor | None = None
        self.encoded: torch.Tensor | None = None

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

    def add_up(self, awaited: Collection[int], ready: Collection[int], settled: bool) -> bool:
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
        assert self.total is not None
        factor = self.factor()
        if factor != 1.0:
            self.multiply(factor)
        self.square = square_of(self.total) if self.lead().clip is not None else None
        return self.square or 0.0

    def multiply(self, factor: float) -> None:
        assert self.total is not None
        self.total = torch.mul(self.total, factor, out=self._writable())

    def payload(self) -> torch.Tensor | bytes:
        assert self.total is not None
        return self.total

    def set_payload(self, payload: torch.Tensor) -> None:
        self.total = payload.view(self.weights.dtype)

    def step_alone(self, meta: Meta, *given: Any) -> None:
        super().step_alone(meta, *given)
        self.seen[meta.worker.rank] += 1

    def stale(self, rank: int) -> int:
        return max(0, self.version - self.seen.setdefault(rank, self.version))

    def skip(self) -> None:
        self.version += 1
        self.seen = {rank: version + 1 for rank, version in self.seen.items()}

    def apply(self, options: dict[str, Any] | None) -> None:
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
        for release in self.held:
            release()
        self.total, self.room, self.added, self.held, self.clipped = None, None, [], [], False

    def encode(self) -> None:
        """Say in few bits what has changed, where workers get it so."""
        if self.down is not None:
            assert self.sent is not None
            changes = self.optimizer is not None
            self.encoded = self.down.values(self.weights, self.sent, changes, self.key)
            take_values(self.down.codec, self.encoded, self.sent, changes)

    def changed_outside(self) -> None:
        """Workers that get compressed changes get the value whole next time."""
        super().changed_outside()
        if self.down is not None:
            self.sent, self.encoded = self.weights.clone(), None
            self.down.load(torch.zeros(len(self.weights)))

    def give(self, worker: StepWorker, asked: Any) -> None:
        self.seen[worker.rank] = self.version
        worker.give(self)
