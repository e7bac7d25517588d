"""The rows that came: what a collate function of the user's makes of its samples, which it may drop
or add to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from allhands.comm import all_reduce_sum
from allhands.data.feed import Feed
from allhands.data.prefetch import StepBatch, a_step_ahead
from allhands.data.trees import map_tensors
from allhands.errors import UserError
from allhands.world import World

# Samples of the data set that are asked for, one number after another, until a row comes of them.
_TRIED = (1, 4, 16, 64, 256)


class CountedRows:
    """The steps of a feed, with the numbers of the rows that came in place of those of the samples
    that were asked for.

    A micro-batch without a row is left out, and a step without one on any rank too. Where ranks are
    `level`, another row of this rank's takes the place of such a micro-batch, and counts as 0
    samples.

    Args:
        feed: whose batches a collate function of the user's makes.
        rows_of: the rows in a batch; None: as many as were asked for.
        world: the ranks that take a step together, which exchange two numbers a step; None: each
            step is this rank's own.
        counts: False where another rank sees the same samples.

    Attributes:
        samples: of the data set in the step that was given last, over all ranks, those of steps
            that were left out included.
    """

    def __init__(
        self,
        feed: Feed,
        rows_of: Callable[[Any], int | None],
        world: World | None = None,
        counts: bool = True,
    ) -> None:
        self.feed, self.rows_of, self.world, self.counts = feed, rows_of, world, counts
        self.samples = 0
        self._spare: Any = None

    def __call__(self, steps: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """The steps; on a GPU, each is read and its numbers are on their way when the one before it
        is handed out."""
        if self.world is None or self.world.world_size == 1:
            counted: Iterator[tuple[StepBatch, int]] = map(self._alone, steps)
        elif self.world.device.type == "cpu":
            counted = (self._receive(self._send(step)) for step in steps)
        else:
            counted = a_step_ahead(steps, self._send, self._receive)
        left_out = 0
        for step, asked in counted:
            left_out += asked
            if step[2] or self.world is None:
                self.samples, left_out = left_out, 0
                yield step

    def _alone(self, step: StepBatch) -> tuple[StepBatch, int]:
        batches, counts = self._own(*step[:2])
        return (self._whole(batches), counts, sum(counts), not batches), step[2]

    def _send(self, step: StepBatch) -> tuple[Any, ...]:
        """Begin to add up over the ranks: the rows, and how many ranks have none."""
        assert self.world is not None
        batches, counts = self._own(*step[:2])
        own = sum(counts)
        numbers = torch.tensor([own if self.counts else 0, not own], dtype=torch.int64).to(
            self.world.device
        )
        all_reduce_sum([numbers], self.world)
        if not numbers.is_cuda:
            return batches, counts, numbers, None, step[2]
        there = torch.empty(2, dtype=torch.int64, pin_memory=True)
        there.copy_(numbers, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return batches, counts, there, done, step[2]

    def _receive(self, sent: tuple[Any, ...]) -> tuple[StepBatch, int]:
        batches, counts, numbers, done, asked = sent
        if done is not None:
            done.synchronize()
        total, without = numbers.tolist()
        return (
            self._whole(batches) if total else (),
            counts,
            total,
            bool(without) and not self.feed.level,
        ), asked

    def _own(self, batches: Sequence[Any], counts: Sequence[int]) -> tuple[list[Any], list[int]]:
        """This rank's micro-batches, and the rows in each; None is one without a row that ranks
        must have."""
        came: list[tuple[Any, int]] = []
        for batch, count in zip(batches, counts, strict=True):
            found = self.rows_of(batch)
            rows = count if found is None else found
            if rows and found is not None and self.feed.level:
                self._spare = batch, rows
            if rows or (self.feed.level and found is None):
                came.append((batch, rows if count else 0))
            elif self.feed.level:
                came.append((None, 0))
        return [batch for batch, _ in came], [rows for _, rows in came]

    def _whole(self, batches: list[Any]) -> list[Any]:
        return [self._spare_row() if batch is None else batch for batch in batches]

    def _spare_row(self) -> Any:
        """A batch with a row of this rank's, for the sake of the ranks that wait for it in their
        own pass."""
        for number in _TRIED:
            if self._spare is not None:
                break
            try:
                batch = self.feed.example(number)
            except UserError:
                break  # a stream cannot be read twice
            rows = self.rows_of(batch)
            self._spare = (batch, rows) if rows else None
        if self._spare is None:
            raise UserError(
                f"the collate function of loader '{self.feed.name}' has dropped all samples of a "
                "rank before any row came, and with this strategy each rank must call the model; "
                "let it give at least one row, or use distributed='ddp'"
            )
        batch, rows = self._spare
        return map_tensors(
            batch, lambda tensor: tensor[:1] if tensor.dim() and len(tensor) == rows else tensor
        )
