"""What one rank reads of one data set: micro-batches grouped into optimizer steps.

A feed yields, for each optimizer step, ``(batches, counts, total, idle)``: this rank's micro-batches (possibly none), the
number of samples in each, the number of samples of the whole global batch over all ranks, and whether some rank has none.
Every rank gets the same number of steps in an epoch.

Where ranks must call the model equally often (``level``), a rank that is short of samples gets micro-batches of one sample that
count as 0 samples, and no rank is without a micro-batch.
"""

from __future__ import annotations

import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from allhands.comm import all_gather_rows
from allhands.data.agree import checksum
from allhands.data.order import Dealer, StepShare
from allhands.data.random import derive_seed, preserved_generators
from allhands.data.seeded import Request, Samples, SeededDataset, StreamGenerators, seeded_collate
from allhands.data.sources import BatchSource, IndexSource, OrderSource
from allhands.errors import UserError
from allhands.world import World

StepBatch = tuple[Sequence[Any], Sequence[int], int, bool]

# Batches are gathered for many steps by one index operation; this bounds the copy that it makes, in bytes.
GATHER_BYTES = 64 * 1024 * 1024


class Feed(ABC):
    """One rank's view of one loader.

    Attributes:
        name: the loader's name, such as ``"train"``.
        kind: how it is read, in words, for the line that is printed at the start.
        batch_size: samples of one micro-batch on one rank (0 where the user's batch sampler decides).
        global_batch: samples of one full optimizer step over all ranks (0 where the user's batch sampler decides).
        num_samples: samples in an epoch, or None when only reading tells.
        num_steps: optimizer steps in an epoch, or None when only reading tells.
        targets: the last member of every batch, for the whole data set, where it lies in memory.
        order: where the order of an epoch comes from; None for a stream, which has its own.
    """

    name: str
    kind: str
    batch_size: int
    global_batch: int
    num_samples: int | None
    num_steps: int | None
    targets: torch.Tensor | None = None
    order: OrderSource | None = None

    @abstractmethod
    def epoch(self, epoch: int, skip: int = 0) -> Iterator[StepBatch]:
        """The steps of one epoch, in order.

        Args:
            epoch: counted from 0.
            skip: samples of the epoch's global order that earlier steps have taken, at this world size or another one. They
                are not read, except from a stream, which cannot be entered in the middle.
        """

    def example(self, count: int) -> Any:
        """A batch of the first `count` samples of the data set, in its own order; no sampler is asked.

        Raises:
            UserError: there is no first sample that can be read twice.
        """
        raise UserError(f"loader '{self.name}' is a stream, of which no sample can be read before the training begins")

    def state_dict(self, within_epoch: bool) -> dict[str, Any]:
        """What the user's own sampler needs to go on; of use on rank 0, which draws from it.

        Args:
            within_epoch: the epoch is to go on, so the order that was drawn for it belongs to the state.
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

    The gathered rows are copies, so that a model which changes its input in place cannot damage the data set.
    """

    kind = "in memory"
    order: IndexSource

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], order: IndexSource, deal: dict[str, Any],
                 rank: int, device: torch.device) -> None:  # fmt: skip
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
        order = self.order.indices(epoch)[skip:]
        dealer = Dealer(len(order), **self.deal)
        size, per_rank = dealer.batch_size, dealer.batch_size * dealer.accumulate
        full = len(order) // dealer.global_batch
        # [step, rank, sample]: this rank's contiguous share of every full step
        mine = order[: full * dealer.global_batch].view(full, dealer.world_size, per_rank)[:, self.rank]
        counts = (size,) * dealer.accumulate
        steps_at_once = max(1, GATHER_BYTES // (self.row_bytes * per_rank))
        # An epoch that goes on cuts its batches out of a block at the same places as one that was not interrupted: the last bit
        # of a product depends on how its operands lie in memory. The rows of the block's earlier steps are only there for that.
        earlier = skip // dealer.global_batch % steps_at_once
        for first in range(-earlier, full, steps_at_once):
            before = mine.new_zeros(max(0, -first) * per_rank)
            rows = self._gather(torch.cat([before, mine[max(0, first) : first + steps_at_once].reshape(-1)]))
            cut = zip(*(tensor.split(size) for tensor in rows), strict=True)
            batches = itertools.islice(cut, len(before) // size, None)
            if dealer.accumulate == 1:
                for batch in batches:
                    yield (batch,), counts, dealer.global_batch, False
            else:
                for micro_batches in zip(*[batches] * dealer.accumulate, strict=True):
                    yield micro_batches, counts, dealer.global_batch, False
        if full < dealer.num_steps:
            first = full * dealer.global_batch
            share = dealer.share(first, len(order) - first, self.rank)
            parts = [part for _, part in _cut(order, share)]
            last = []
            if parts:
                rows = self._gather(torch.cat(parts))
                last = list(zip(*(t.split([len(part) for part in parts]) for t in rows), strict=True))
            yield last, share.sizes, share.total, _idle(share, dealer)

    def example(self, count: int) -> Any:
        return tuple(self._gather(torch.arange(min(count, self.order.length))))

    def _gather(self, indices: torch.Tensor) -> list[torch.Tensor]:
        on_data = indices.to(self.tensors[0].device)
        rows = [tensor.index_select(0, on_data) for tensor in self.tensors]
        if rows[0].device != self.device:
            if self.device.type == "cuda":
                rows = [row.pin_memory() if row.device.type == "cpu" else row for row in rows]
            rows = [row.to(self.device, non_blocking=True) for row in rows]
        return rows


class LoaderFeed(Feed):
    """Batches of a map-style data set through a DataLoader that keeps the user's collate function and loader processes."""

    order: OrderSource

    def __init__(self, name: str, dataset: Any, order: OrderSource, deal: dict[str, Any], rank: int, seed: int,
                 options: dict[str, Any]) -> None:  # fmt: skip
        self.name = name
        self.order = order
        self.deal = deal
        self.rank = rank
        self.seed = seed
        workers = options.get("num_workers", 0)
        self.kind = f"{workers} loader process{'es' if workers != 1 else ''}" if workers else "read in the worker itself"
        self._batches = _RankBatches()
        self._generator = torch.Generator()
        options = dict(options)
        options["collate_fn"] = seeded_collate(options.get("collate_fn"))
        # The sampler's batches are requests that the data set wrapper understands, not the lists that PyTorch's types expect.
        requests: Any = self._batches
        self.loader: DataLoader[Any] = DataLoader(
            SeededDataset(dataset), batch_sampler=requests, generator=self._generator, **options
        )
        if isinstance(order, IndexSource):
            dealer = Dealer(order.length, **deal)
            self.batch_size, self.global_batch = dealer.batch_size, dealer.global_batch
            self.num_samples, self.num_steps = order.length, dealer.num_steps
        else:
            self.batch_size = self.global_batch = 0
            self.num_samples = None
            self.num_steps = None if order.length is None else Dealer(order.length, **deal).num_steps

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[StepBatch]:
        steps = self._plan(epoch, skip)
        seed = derive_seed(self.seed, "sample", self.name, epoch)
        self._batches.batches = [(seed, first, batch) for batches, _, _, _ in steps for first, batch in batches]
        # What loader processes draw outside of samples, in a worker_init_fn: others in each epoch and on each rank.
        self._generator.manual_seed(derive_seed(self.seed, "loader", self.name, epoch, self.rank))
        with _reading(self.loader) as loaded:
            for batches, counts, total, idle in steps:
                yield [next(loaded) for _ in batches], counts, total, idle

    def example(self, count: int) -> Any:
        dataset = self.loader.dataset
        indices = range(min(count, len(dataset)))  # type: ignore[arg-type]
        with preserved_generators():
            samples = dataset.__getitems__((derive_seed(self.seed, "example", self.name), 0, indices))  # type: ignore[attr-defined]
            return self.loader.collate_fn(samples)

    def close(self) -> None:
        _end_processes(self.loader._iterator)

    def _plan(self, epoch: int, skip: int) -> list[tuple[list[tuple[int, list[int]]], list[int], int, bool]]:
        """For each step: this rank's batches, as the position of their first sample in the epoch and the sample indices; the
        samples of each; those of the whole step; whether a rank has none."""
        if isinstance(self.order, BatchSource):
            made = self.order.batches(epoch)
            starts = list(itertools.accumulate(map(len, made), initial=0))
            if skip not in starts:
                raise UserError(
                    f"loader '{self.name}' cannot go on after {skip} samples: its batch sampler now makes batches that end "
                    f"after {', '.join(map(str, starts[1:6]))}… samples. Resume with the batch sampler of the checkpoint"
                )
            left = starts.index(skip)
            dealer = Dealer(len(made) - left, **self.deal)
            steps = []
            for number, share in enumerate(dealer.shares(self.rank)):
                first = left + number * dealer.global_batch
                samples = starts[first + share.total] - starts[first]
                mine = range(left + share.start, left + share.start + sum(share.sizes))
                batches, counts = [(starts[i], made[i]) for i in mine], [len(made[i]) for i in mine]
                short = len(share.sizes) - len(batches)
                batches += [(starts[first], made[first][:1])] * short
                steps.append((batches, counts + [0] * short, samples, _idle(share, dealer)))
            return steps
        assert isinstance(self.order, IndexSource)
        order = self.order.indices(epoch)[skip:].tolist()
        dealer = Dealer(len(order), **self.deal)
        return [
            (_cut(order, share, skip), list(share.sizes), share.total, _idle(share, dealer)) for share in dealer.shares(self.rank)
        ]


class IterableFeed(Feed):
    """Batches of an iterable data set: every rank reads the whole stream and keeps its contiguous share of each global batch.

    Reading is repeated on every rank, which costs reading time but no exactness: the samples and their order are those of
    a single process. The dealing happens in the loader process where there is one.
    """

    def __init__(self, name: str, dataset: IterableDataset[Any], deal: dict[str, Any], rank: int, world: World, seed: int,
                 options: dict[str, Any]) -> None:  # fmt: skip
        self.dealer = dealer = Dealer(0, **deal)
        self.name = name
        self.world = world
        self.kind = "an iterable, read on every rank and dealt out"
        self.batch_size, self.global_batch = dealer.batch_size, dealer.global_batch
        self.num_samples = self.num_steps = None
        self.seed = seed
        self._generator = torch.Generator()
        options = dict(options)
        options.pop("persistent_workers", None)  # a process is started for each epoch, so that it knows which one it is
        self._stream = _DealtStream(dataset, dealer, rank, options.pop("collate_fn", None))
        self.loader: DataLoader[Any] = DataLoader(self._stream, batch_size=None, generator=self._generator, **options)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[StepBatch]:
        # The same seed on every rank: a stream that shuffles must shuffle alike everywhere, or samples are lost.
        self._stream.seed = derive_seed(self.seed, "stream", self.name, epoch)
        self._stream.skip = skip
        self._generator.manual_seed(self._stream.seed)  # for a worker_init_fn that draws
        set_epoch = getattr(self._stream.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        with _reading(self.loader) as loaded:
            for batches, counts, total, fingerprint in loaded:
                self._check_same_stream(total, fingerprint)
                yield batches, counts, total, not self.dealer.level and total < self.dealer.world_size
        self._check_same_stream(0, 0)

    def _check_same_stream(self, total: int, fingerprint: int) -> None:
        """Raise unless every rank has read the same block; without this, ranks that read other streams would train on
        samples twice or wait for one another for ever."""
        if self.world.world_size == 1:
            return
        mine = torch.tensor([[total, fingerprint]], dtype=torch.int64, device=self.world.device)
        seen = [tuple(row[0].tolist()) for row in all_gather_rows(mine, self.world)]
        if len(set(seen)) > 1:
            raise UserError(
                f"the ranks read different streams from loader '{self.name}': samples in this block by rank: "
                f"{[total for total, _ in seen]}, checksums {[checksum for _, checksum in seen]}. An IterableDataset must "
                "give the same samples in the same order on every rank (allhands deals them out); remove its own sharding "
                "by rank, or derive its shuffling from a fixed seed"
            )


@contextmanager
def _reading(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """An iterator whose loader processes end with the block, unless they serve the next epoch too.

    Where that is left to the garbage collector, which may take their queues apart first, PyTorch waits five seconds for each.
    """
    loaded = iter(loader)
    try:
        yield loaded
    finally:
        if not loader.persistent_workers:
            _end_processes(loaded)


def _end_processes(loaded: Any) -> None:
    end = getattr(loaded, "_shutdown_workers", None)  # PyTorch's own; an iterator without processes has none
    if end is not None:
        end()


class _RankBatches:
    """A batch sampler whose batches are replaced before each epoch."""

    def __init__(self) -> None:
        self.batches: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _DealtStream(IterableDataset[Any]):
    """The share of one rank of a stream, already collated into steps."""

    def __init__(self, dataset: IterableDataset[Any], dealer: Dealer, rank: int, collate: Any) -> None:
        self.dataset = dataset
        self.dealer = dealer
        self.rank = rank
        self.collate = seeded_collate(collate)
        self.seed = self.skip = 0

    def __iter__(self) -> Iterator[tuple[Sequence[Any], Sequence[int], int, int]]:
        # A collate function that draws seeds the generators for itself, and must not move the stream's.
        reading = StreamGenerators(self.seed, alone=get_worker_info() is not None and self.collate is None)
        with reading:
            samples = itertools.islice(self.dataset, self.skip, None)
        first, size = self.skip, self.dealer.global_batch
        while True:
            with reading:
                block = list(itertools.islice(samples, size))
            if not block or (len(block) < size and self.dealer.drop_last):
                return
            yield self._deal(block, first)
            if len(block) < size:
                return
            first += size

    def _deal(self, block: list[Any], first: int) -> tuple[Sequence[Any], Sequence[int], int, int]:
        share = self.dealer.share(0, len(block), self.rank)
        collate = self.collate or default_collate
        batches = [collate(Samples(self.seed, position, part)) for position, part in _cut(block, share, first)]
        return batches, share.sizes, share.total, _fingerprint([block[0], block[-1]])


def _fingerprint(sample: Any) -> int:
    """A 32-bit checksum of one sample, the same on every rank that reads the same sample."""
    if isinstance(sample, torch.Tensor):
        return checksum(sample)
    if isinstance(sample, Mapping):
        return zlib.crc32(repr([(str(key), _fingerprint(value)) for key, value in sample.items()]).encode())
    if isinstance(sample, (list, tuple)):
        return zlib.crc32(repr([_fingerprint(value) for value in sample]).encode())
    if isinstance(sample, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(sample).tobytes())
    return zlib.crc32(repr(sample).encode()) if isinstance(sample, (int, float, str, bytes, bool)) else 0


def _idle(share: StepShare, dealer: Dealer) -> bool:
    """Whether some rank has no micro-batch in this step."""
    return not dealer.level and share.total < dealer.world_size


def _cut(items: Any, share: StepShare, offset: int = 0) -> list[tuple[int, Any]]:
    """The micro-batches of a share, out of all the items of the epoch (or of the block that the share is of), each with the
    position of its first item, counted from `offset`. One of size 0 gets the first item of the global batch."""
    parts, start = [], share.start
    for size in share.sizes:
        first, stop = (start, start + size) if size else (share.first, share.first + 1)
        parts.append((offset + first, items[first:stop]))
        start += size
    return parts
