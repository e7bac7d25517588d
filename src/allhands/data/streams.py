"""Batches of an iterable data set, dealt out to the ranks."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from allhands.comm import all_gather_rows
from allhands.data.agree import checksum
from allhands.data.epochs import EpochListeners
from allhands.data.feed import Feed, cut
from allhands.data.loaders import reading, with_processes
from allhands.data.order import Dealer
from allhands.data.prefetch import StepBatch, ahead
from allhands.data.random import derive_seed
from allhands.data.seeded import SeededBatch, StreamGenerators, seeded_collate
from allhands.errors import UserError
from allhands.world import World


class IterableFeed(Feed):
    """Batches of an iterable data set: every rank reads the whole stream and keeps its contiguous
    share of each global batch.

    Reading is repeated on every rank, which costs reading time but no exactness: the samples and
    their order are those of a single process. The dealing happens in the loader process where there
    is one.
    """

    def __init__(
        self,
        name: str,
        dataset: IterableDataset[Any],
        deal: dict[str, Any],
        rank: int,
        world: World,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        self.dealer = dealer = Dealer(0, **deal)
        self.name = name
        self.world = world
        self.kind = "an iterable, read on every rank and dealt out"
        self.batch_size, self.global_batch = dealer.batch_size, dealer.global_batch
        self.num_samples = self.num_steps = None
        self.seed = seed
        self._generator = torch.Generator()
        options = with_processes(name, options, stream=True)
        # A process is started for each epoch, so that it knows which one it is.
        options.pop("persistent_workers", None)
        self._listeners = EpochListeners(dataset, options.get("collate_fn"))
        self._stream = _DealtStream(dataset, dealer, rank, options.pop("collate_fn", None))
        self.loader: DataLoader[Any] = DataLoader(
            self._stream, batch_size=None, generator=self._generator, **options
        )

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[StepBatch]:
        return ahead(self._read(epoch, skip), self.world.device)

    @contextmanager
    def _reading(self, epoch: int, skip: int) -> Iterator[Iterator[Any]]:
        # The same seed on every rank: a stream that shuffles must shuffle alike everywhere, or
        # samples are lost.
        self._stream.seed = derive_seed(self.seed, "stream", self.name, epoch)
        self._stream.skip = skip
        self._generator.manual_seed(self._stream.seed)  # for a worker_init_fn that draws
        self._listeners.set_epoch(epoch)
        with reading(self.loader, self.name) as loaded:
            yield loaded

    def _read(self, epoch: int, skip: int) -> Iterator[StepBatch]:
        with self._reading(epoch, skip) as loaded:
            for batches, counts, total, fingerprint in loaded:
                self._check_same_stream(total, fingerprint)
                yield (
                    batches,
                    counts,
                    total,
                    not self.dealer.level and total < self.dealer.world_size,
                )
        self._check_same_stream(0, 0)

    def _check_same_stream(self, total: int, fingerprint: int) -> None:
        """Raise unless every rank has read the same block; without this, ranks that read other
        streams would train on samples twice or wait for one another for ever."""
        if self.world.world_size == 1:
            return
        mine = torch.tensor([[total, fingerprint]], dtype=torch.int64, device=self.world.device)
        seen = [tuple(row[0].tolist()) for row in all_gather_rows(mine, self.world)]
        if len(set(seen)) > 1:
            raise UserError(
                f"the ranks read different streams from loader '{self.name}': samples in this "
                f"block by rank: {[total for total, _ in seen]}, checksums "
                f"{[checksum for _, checksum in seen]}. An IterableDataset must give the same "
                "samples in the same order on every rank, which allhands deals out: derive its "
                "shuffling from a fixed seed. If it gives each rank its own part already, say so: "
                "DataLoader(allhands.SplitByRank(dataset), …)"
            )


class _DealtStream(IterableDataset[Any]):
    """The share of one rank of a stream, already collated into steps."""

    def __init__(
        self, dataset: IterableDataset[Any], dealer: Dealer, rank: int, collate: Any
    ) -> None:
        self.dataset = dataset
        self.dealer = dealer
        self.rank = rank
        self.collate = seeded_collate(collate)
        self.seed = self.skip = 0

    def __iter__(self) -> Iterator[tuple[Sequence[Any], Sequence[int], int, int]]:
        # A collate function that draws seeds the generators for itself, and must not move the
        # stream's.
        reading = StreamGenerators(
            self.seed, alone=get_worker_info() is not None and self.collate is None
        )
        with reading:
            samples = itertools.islice(_in_own_order(self.dataset), self.skip, None)
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
        batches = [
            collate(SeededBatch(self.seed, position, part))
            for position, part in cut(block, share, first)
        ]
        return batches, share.sizes, share.total, _fingerprint([block[0], block[-1]])


def _in_own_order(dataset: Any) -> Iterator[Any]:
    """The samples of a stream, in the order in which the training's own process would read them.

    The streams of Hugging Face shuffle otherwise where they see that they are in a loader process,
    even if it is the only one.
    """
    if not is_of_hugging_face(dataset) or get_worker_info() is None:
        return iter(dataset)
    return _unseen(dataset)


def _unseen(dataset: Any) -> Iterator[Any]:
    end = object()
    torch.utils.data.get_worker_info = lambda: None
    try:
        samples = iter(dataset)
        first = next(samples, end)  # they look when they begin
    finally:
        torch.utils.data.get_worker_info = get_worker_info
    if first is not end:
        yield first
        yield from samples


def is_of_hugging_face(dataset: Any) -> bool:
    """Whether it is one of the library ``datasets``."""
    return type(dataset).__module__.partition(".")[0] == "datasets"


def _fingerprint(sample: Any) -> int:
    """A 32-bit checksum of one sample, the same on every rank that reads the same sample."""
    if isinstance(sample, torch.Tensor):
        return checksum(sample)
    if isinstance(sample, Mapping):
        return zlib.crc32(
            repr([(str(key), _fingerprint(value)) for key, value in sample.items()]).encode()
        )
    if isinstance(sample, (list, tuple)):
        return zlib.crc32(repr([_fingerprint(value) for value in sample]).encode())
    if isinstance(sample, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(sample).tobytes())
    if isinstance(sample, (int, float, str, bytes, bool)):
        return zlib.crc32(repr(sample).encode())
    return 0
