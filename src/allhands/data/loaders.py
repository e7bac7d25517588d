"""Batches of a map-style data set through a DataLoader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from allhands.data.epochs import EpochListeners
from allhands.data.feed import Feed, cut, is_idle
from allhands.data.order import Dealer
from allhands.data.prefetch import StepBatch, ahead
from allhands.data.random import derive_seed, preserved_generators
from allhands.data.seeded import Request, SeededDataset, seeded_collate
from allhands.data.sending import LoaderProcess, read_error
from allhands.data.sources import BatchSource, IndexSource, OrderSource
from allhands.errors import UserError


class LoaderFeed(Feed):
    """Batches of a map-style data set through a DataLoader that keeps the user's collate function
    and loader processes."""

    order: OrderSource

    def __init__(
        self,
        name: str,
        dataset: Any,
        order: OrderSource,
        deal: dict[str, Any],
        rank: int,
        seed: int,
        options: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.name = name
        self.order = order
        self.deal = deal
        self.rank = rank
        self.seed = seed
        self.device = device
        workers = options.get("num_workers", 0)
        if workers:
            self.kind = f"{workers} loader process{'es' if workers != 1 else ''}"
        else:
            self.kind = "read in the worker itself"
        self._batches = _RankBatches()
        self._generator = torch.Generator()
        options = with_processes(name, options)
        self._listeners = EpochListeners(dataset, options.get("collate_fn"))
        if self._listeners and workers and options.get("persistent_workers"):
            raise UserError(
                f"loader '{name}' has persistent_workers=True, whose processes keep what they were "
                f"given in the first epoch, so that set_epoch of {self._listeners.names()} would "
                "never reach them; write persistent_workers=False"
            )
        options["collate_fn"] = seeded_collate(options.get("collate_fn"))
        # The sampler's batches are requests that the data set wrapper understands, not the lists
        # that PyTorch's types expect.
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
            self.num_steps = (
                None if order.length is None else Dealer(order.length, **deal).num_steps
            )

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[StepBatch]:
        return ahead(self._read(epoch, skip), self.device)

    def _read(self, epoch: int, skip: int) -> Iterator[StepBatch]:
        self._listeners.set_epoch(epoch)
        parts, steps = self._plan(epoch, skip)
        seed = derive_seed(self.seed, "sample", self.name, epoch)
        self._batches.requests = ((seed, first, batch) for first, batch in parts)
        # What loader processes draw outside of samples, in a worker_init_fn: others in each epoch
        # and on each rank.
        self._generator.manual_seed(derive_seed(self.seed, "loader", self.name, epoch, self.rank))
        with reading(self.loader, self.name) as loaded:
            for counts, total, idle in steps:
                yield [next(loaded) for _ in counts], counts, total, idle

    def example(self, count: int) -> Any:
        dataset = self.loader.dataset
        indices = range(min(count, len(dataset)))  # type: ignore[arg-type]
        with preserved_generators():
            samples = dataset.__getitems__(  # type: ignore[attr-defined]
                (derive_seed(self.seed, "example", self.name), 0, indices)
            )
            return self.loader.collate_fn(samples)

    def close(self) -> None:
        end_processes(self.loader._iterator)

    def _plan(
        self, epoch: int, skip: int
    ) -> tuple[Iterator[tuple[int, list[int]]], Iterator[tuple[list[int], int, bool]]]:
        """This rank's batches, as the position of their first sample in the epoch and the sample
        indices; and for each step: the samples of each of its batches; those of the whole step;
        whether a rank has none.

        Loader processes read ahead, so that the one runs before the other.
        """
        if isinstance(self.order, BatchSource):
            made = self.order.batches(epoch)
            starts = list(itertools.accumulate(map(len, made), initial=0))
            if skip not in starts:
                raise UserError(
                    f"loader '{self.name}' cannot go on after {skip} samples: its batch sampler "
                    f"now makes batches that end after {', '.join(map(str, starts[1:6]))}… "
                    "samples. Resume with the batch sampler of the checkpoint"
                )
            left = starts.index(skip)
            dealer = Dealer(len(made) - left, **self.deal)
            steps: list[tuple[list[int], int, bool]] = []
            parts: list[tuple[int, list[int]]] = []
            for number, share in enumerate(dealer.shares(self.rank)):
                first = left + number * dealer.global_batch
                samples = starts[first + share.total] - starts[first]
                mine = range(left + share.start, left + share.start + sum(share.sizes))
                batches, counts = [(starts[i], made[i]) for i in mine], [len(made[i]) for i in mine]
                short = len(share.sizes) - len(batches)
                batches += [(starts[first], made[first][:1])] * short
                parts += batches
                steps.append((counts + [0] * short, samples, is_idle(share, dealer)))
            return iter(parts), iter(steps)
        assert isinstance(self.order, IndexSource)
        # Eight bytes a sample; all indices at once as Python's numbers would be fifty.
        order = self.order.indices(epoch)[skip:]
        dealer = Dealer(len(order), **self.deal)
        return (
            (first, part.tolist())
            for share in dealer.shares(self.rank)
            for first, part in cut(order, share, skip)
        ), (
            (list(share.sizes), share.total, is_idle(share, dealer))
            for share in dealer.shares(self.rank)
        )


def with_processes(name: str, options: dict[str, Any], stream: bool = False) -> dict[str, Any]:
    """The options of a DataLoader, whose processes, if it has any, say when they cannot send a
    batch."""
    options = dict(options)
    if options.get("num_workers"):
        options["worker_init_fn"] = LoaderProcess(name, options.get("worker_init_fn"), stream)
    return options


@contextmanager
def reading(loader: DataLoader[Any], name: str) -> Iterator[Iterator[Any]]:
    """An iterator whose loader processes end with the block, unless they serve the next epoch too.

    Where that is left to the garbage collector, which may take their queues apart first, PyTorch
    waits five seconds for each.

    Raises:
        UserError: a loader process cannot send its batch, see `allhands.data.sending`.
    """
    loaded = iter(loader)
    try:
        yield loaded
    except RuntimeError as error:
        explained = read_error(name, error) if loader.num_workers else None
        if explained is None:
            raise
        raise explained from error
    finally:
        if not loader.persistent_workers:
            end_processes(loaded)


def end_processes(loaded: Any) -> None:
    # PyTorch's own; an iterator without processes has none.
    end = getattr(loaded, "_shutdown_workers", None)
    if end is not None:
        end()


class _RankBatches:
    """A batch sampler whose batches are replaced before each epoch."""

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests
