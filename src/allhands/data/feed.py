"""What one rank reads of one data set: micro-batches grouped into optimizer steps.

A feed yields, for each optimizer step, ``(batches, counts, total, idle)``: this rank's
micro-batches (possibly none), the number of samples in each, the number of samples of the whole
global batch over all ranks, and whether some rank has none. Every rank gets the same number of
steps in an epoch. On a GPU, micro-batches are there a step before they are asked for, see
`prefetch`.

Where ranks must call the model equally often (``level``), a rank that is short of samples gets
micro-batches of one sample that count as 0 samples, and no rank is without a micro-batch.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from allhands.data.order import Dealer, StepShare
from allhands.data.prefetch import StepBatch, ahead, is_copied
from allhands.data.sources import IndexSource, OrderSource
from allhands.errors import UserError

# Batches are gathered for many steps by one index operation; this bounds the copy that it makes, in
# bytes.
GATHER_BYTES = 64 * 1024 * 1024


class Feed(ABC):
    """One rank's view of one loader.

    Attributes:
        name: the loader's name, such as ``"train"``.
        kind: how it is read, in words, for the line that is printed at the start.
        batch_size: samples of one micro-batch on one rank (0 where the user's batch sampler
            decides).
        global_batch: samples of one full optimizer step over all ranks (0 where the user's batch
            sampler decides).
        num_samples: samples in an epoch, or None when only reading tells.
        num_steps: optimizer steps in an epoch, or None when only reading tells.
        targets: the last member of every batch, for the whole data set, where it lies in memory.
        ordered: whether the shares of a step, rank after rank, are in the order of the data set.
        order: where the order of an epoch comes from; None for a stream, which has its own.
        own_collate: a collate function of the user's makes the batches, and may drop samples or add
            rows; see `CountedRows`.
        level: ranks must call the model equally often.
    """

    name: str
    kind: str
    batch_size: int
    global_batch: int
    num_samples: int | None
    num_steps: int | None
    targets: torch.Tensor | None = None
    ordered: bool = True
    order: OrderSource | None = None
    own_collate: bool = False
    level: bool = False

    @abstractmethod
    def epoch(self, epoch: int, skip: int = 0) -> Iterator[StepBatch]:
        """The steps of one epoch, in order.

        Args:
            epoch: counted from 0.
            skip: samples of the epoch's global order that earlier steps have taken, at this world
                size or another one. They are not read, except from a stream, which cannot be
                entered in the middle.
        """

    def example(self, count: int) -> Any:
        """A batch of the first `count` samples of the data set, in its own order; no sampler is
        asked.

        Raises:
            UserError: there is no first sample that can be read twice.
        """
        raise UserError(
            f"loader '{self.name}' is a stream, of which no sample can be read before the training "
            "begins"
        )

    def state_dict(self, within_epoch: bool) -> dict[str, Any]:
        """What the user's own sampler needs to go on; of use on rank 0, which draws from it.

        Args:
            within_epoch: the epoch is to go on, so the order that was drawn for it belongs to the
                state.
        """
        return self.order.state_dict(within_epoch) if self.order is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        if self.order is not None:
            self.order.load_state_dict(state)

    def close(self) -> None:
        """End what outlives an epoch; no epoch is read afterwards."""


class InMemoryFeed(Feed):
    """Batches of a tensor data set, gathered for many steps at once by one index operation.

    The gathered rows are copies, so that a model which changes its input in place cannot damage the
    data set.
    """

    kind = "in memory"
    order: IndexSource

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        order: IndexSource,
        deal: dict[str, Any],
        rank: int,
        device: torch.device,
    ) -> None:
        self.name = name
        self.order = order
        self.deal = deal
        self.rank = rank
        self.device = device
        self.tensors = tuple(tensors)
        self.row_bytes = max(1, sum(t[:1].numel() * t.element_size() for t in self.tensors))
        dealer = Dealer(order.length, **deal)
        self.batch_size = dealer.batch_size
        self.global_batch = dealer.global_batch
        self.num_samples = order.length
        self.num_steps = dealer.num_steps
        if device.type == "cuda" and self._fits_on_device():
            self.tensors = tuple(t.to(device) for t in self.tensors)
        if len(self.tensors) > 1:
            self.targets = self.tensors[-1]

    def _fits_on_device(self) -> bool:
        needed = sum(t.numel() * t.element_size() for t in self.tensors if t.device != self.device)
        free, _ = torch.cuda.mem_get_info(self.device)
        return needed <= free // 4  # the model, its gradients and activations need the rest

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[StepBatch]:
        if self._is_there():
            return self._read(epoch, skip)
        return ahead(self._read(epoch, skip), self.device)

    def _is_there(self) -> bool:
        return all(tensor.device == self.device for tensor in self.tensors)

    def _read(self, epoch: int, skip: int) -> Iterator[StepBatch]:
        order = self.order.indices(epoch)[skip:]
        dealer = Dealer(len(order), **self.deal)
        size, per_rank = dealer.batch_size, dealer.batch_size * dealer.accumulate
        if dealer.global_batch != per_rank * dealer.world_size:
            yield from map(self._step_of(order, dealer), dealer.shares(self.rank))
            return
        full = len(order) // dealer.global_batch
        # [step, rank, sample]: this rank's contiguous share of every full step
        mine = order[: full * dealer.global_batch].view(full, dealer.world_size, per_rank)[
            :, self.rank
        ]
        counts = (size,) * dealer.accumulate
        steps_at_once = max(1, GATHER_BYTES // (self.row_bytes * per_rank))
        # An epoch that goes on cuts its batches out of a block at the same places as one that was
        # not interrupted: the last bit of a product depends on how its operands lie in memory. The
        # rows of the block's earlier steps are only there for that.
        earlier = skip // dealer.global_batch % steps_at_once
        for first in range(-earlier, full, steps_at_once):
            before = mine.new_zeros(max(0, -first) * per_rank)
            rows = self._gather(
                torch.cat([before, mine[max(0, first) : first + steps_at_once].reshape(-1)])
            )
            pieces = zip(*(tensor.split(size) for tensor in rows), strict=True)
            batches = itertools.islice(pieces, len(before) // size, None)
            if dealer.accumulate == 1:
                for batch in batches:
                    yield (batch,), counts, dealer.global_batch, False
            else:
                for micro_batches in zip(*[batches] * dealer.accumulate, strict=True):
                    yield micro_batches, counts, dealer.global_batch, False
        if full < dealer.num_steps:
            first = full * dealer.global_batch
            yield self._step_of(order, dealer)(dealer.share(first, len(order) - first, self.rank))

    def _step_of(self, order: torch.Tensor, dealer: Dealer) -> Callable[[StepShare], StepBatch]:
        def step(share: StepShare) -> StepBatch:
            parts = [part for _, part in cut(order, share)]
            batches = []
            if parts:
                rows = self._gather(torch.cat(parts))
                batches = list(
                    zip(*(t.split([len(part) for part in parts]) for t in rows), strict=True)
                )
            return batches, share.sizes, share.total, is_idle(share, dealer)

        return step

    def example(self, count: int) -> Any:
        return tuple(self._gather(torch.arange(min(count, self.order.length))))

    def _gather(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Rows of the data set, where it lies; pinned where they are going to a GPU."""
        pins = self.device.type == "cuda"
        rows = []
        for tensor in self.tensors:
            own = indices.to(tensor.device)
            if pins and is_copied(tensor):
                out = torch.empty(len(own), *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
                rows.append(torch.index_select(tensor, 0, own, out=out))
            else:
                rows.append(tensor.index_select(0, own))
        return rows


def is_idle(share: StepShare, dealer: Dealer) -> bool:
    """Whether some rank has no micro-batch in this step."""
    return not dealer.level and share.total < dealer.world_size


def cut(items: Any, share: StepShare, offset: int = 0) -> list[tuple[int, Any]]:
    """The micro-batches of a share, out of all the items of the epoch (or of the block that the
    share is of), each with the position of its first item, counted from `offset`. One of size 0
    gets the first item of the global batch."""
    parts, start = [], share.start
    for size in share.sizes:
        first, stop = (start, start + size) if size else (share.first, share.first + 1)
        parts.append((offset + first, items[first:stop]))
        start += size
    return parts
