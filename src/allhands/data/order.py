"""Which sample goes where: the one global order of an epoch, and the share of it that each rank
takes.

The order of epoch e is a function of (seed, e) only. Optimizer step t takes the next G samples of
it, where G (the global batch) is ``batch_size * world_size * accumulate`` of the world that began
the training, whoever is left of it; each rank takes its contiguous share of those G. Nothing is
padded, repeated or dropped; only the last step of an epoch may be short, and is dealt out as evenly
as its size allows. A rank's share of a step is cut into micro-batches as a DataLoader of one
process would cut it, see `split_share`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from allhands.data.random import derive_seed


def global_order(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """The shuffled order of one epoch: int64 indices, shape ``[num_samples]``, the same at any
    world size."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator)


def share_of(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """The contiguous part ``[start, stop)`` of `length` items that `rank` takes; sizes differ by at
    most one."""
    size, extra = divmod(length, world_size)
    start = rank * size + min(rank, extra)
    return start, start + size + (rank < extra)


@dataclass(frozen=True, slots=True)
class StepShare:
    """One rank's part of one optimizer step.

    `start` is the position in the epoch's global order of this rank's first item, `sizes` the items
    in each of its micro-batches (empty when the rank has nothing to do in this step), `total` the
    items of the whole global batch, which begins at position `first`. Where the shares are level, a
    size may be 0.
    """

    start: int
    sizes: tuple[int, ...]
    total: int
    first: int = 0


@dataclass(frozen=True)
class Dealer:
    """Deals `num_items` items of an epoch out to the ranks, step by step.

    An item is a sample, or a whole batch where the user's own batch sampler has made the batches.

    Args:
        num_items: items in an epoch.
        batch_size: items of one micro-batch on one rank.
        world_size: number of workers.
        accumulate: micro-batches of one rank in one optimizer step.
        drop_last: leave out a last global batch that is short.
        level: every rank has as many micro-batches in a step as any other, some of them without an
            item if need be.
        began_with: the number of workers with which the training began, where it is not
            `world_size`; it decides the global batch.
    """

    num_items: int
    batch_size: int
    world_size: int = 1
    accumulate: int = 1
    drop_last: bool = False
    level: bool = False
    began_with: int | None = None

    @property
    def global_batch(self) -> int:
        """Items of one full optimizer step, over all workers and accumulation steps."""
        return self.batch_size * (self.began_with or self.world_size) * self.accumulate

    @property
    def num_steps(self) -> int:
        """Optimizer steps in an epoch."""
        full, rest = divmod(self.num_items, self.global_batch)
        return full + (rest > 0 and not self.drop_last)

    def shares(self, rank: int) -> Iterator[StepShare]:
        """`rank`'s part of every step of an epoch, in order; every rank gets the same number of
        steps."""
        for step in range(self.num_steps):
            first = step * self.global_batch
            total = min(self.global_batch, self.num_items - first)
            yield self.share(first, total, rank)

    def share(self, first: int, total: int, rank: int) -> StepShare:
        """`rank`'s part of a global batch of `total` items that begins at position `first`."""
        return split_share(first, total, rank, self.world_size, self.batch_size, self.level)


def split_share(
    first: int, total: int, rank: int, world_size: int, batch_size: int, level: bool = False
) -> StepShare:
    """`rank`'s part of a global batch of `total` items that begins at position `first`; `level` as
    for `Dealer`."""
    start, stop = share_of(total, rank, world_size)
    # Rank 0's share is never smaller than another's.
    most = share_of(total, 0, world_size)[1] if level else stop - start
    own, chunks = stop - start, -(-most // batch_size)
    # A share is cut as a DataLoader cuts it: full micro-batches, then the rest. With several
    # workers a rest of one sample (or of none, where shares are level) is evened out: 9 items as 5
    # and 4, not 8 and 1, which BatchNorm could not train on.
    full = max(0, chunks - 1) * batch_size
    if own - full > (world_size > 1):
        sizes = (batch_size,) * (chunks - 1) + (own - full,)
    else:
        bounds = [share_of(own, chunk, chunks) for chunk in range(chunks)]
        sizes = tuple(b - a for a, b in bounds)
    return StepShare(first + start, sizes, total, first)
