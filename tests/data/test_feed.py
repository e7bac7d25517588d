"""What each rank reads, checked over faked worlds: a feed needs a rank and a size, and no other
process."""

from __future__ import annotations

import multiprocessing
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from allhands import World
from allhands.data import (
    Feed,
    build_feeds,
    global_order,
    sources_from_loaders,
)
from tests.worlds import in_world


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Noise(Dataset[Any]):
    """Draws from all three global generators, as augmentation code does."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        import random

        return torch.tensor(
            [torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64
        )


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def world_of(rank: int, size: int) -> World:
    return World(rank, rank, 0, size, size, torch.device("cpu"), "gloo", "explicit")


def loader_feeds(
    loader: Any, size: int, name: str = "train", seed: int = 1, accumulate: int = 1
) -> list[Feed]:
    """The feeds of all ranks. Comparing the data between ranks is left out, as when one process has
    sent them."""
    return [
        build_feeds(
            sources_from_loaders({name: loader}),
            world_of(rank, size),
            seed,
            accumulate,
            same_everywhere=True,
        )[name]
        for rank in range(size)
    ]


def read(feeds: list[Feed], epoch: int = 0, skip: int = 0) -> list[list[int]]:
    """For each step, the samples of all ranks in the order of the ranks; checks the counts on the
    way."""
    steps = []
    for ranks in zip(*(feed.epoch(epoch, skip) for feed in feeds), strict=True):
        rows: list[int] = []
        for batches, counts, total, idle in ranks:
            assert idle == any(not batches for batches, _, _, _ in ranks)
            for batch, count in zip(batches, counts, strict=True):
                values = batch[0] if isinstance(batch, (tuple, list)) else batch
                assert len(values) == count
                rows += [int(value) for value in values]
            assert total == sum(sum(counts) for _, counts, _, _ in ranks)
        steps.append(rows)
    return steps


def flat(steps: list[list[int]]) -> list[int]:
    return [row for step in steps for row in step]


SETS = {
    "memory": TensorDataset(torch.arange(23)),
    "map-style": Numbers(23),
    "subset": Subset(TensorDataset(torch.arange(40)), range(23)),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_order_is_the_same_at_any_world_size(kind: str, size: int, accumulate: int) -> None:
    feeds = loader_feeds(DataLoader(SETS[kind], 2, shuffle=True), size, accumulate=accumulate)
    for epoch in (0, 1):
        steps = read(feeds, epoch)
        assert flat(steps) == global_order(23, 1, epoch).tolist()
        assert [len(step) for step in steps][:-1] == [2 * size * accumulate] * (len(steps) - 1)
        assert len(steps) == feeds[0].num_steps


@pytest.mark.parametrize("kind", SETS)
def test_an_unshuffled_loader_stays_unshuffled(kind: str) -> None:
    assert flat(read(loader_feeds(DataLoader(SETS[kind], 3), 2))) == list(range(23))


@pytest.mark.parametrize("length", [8, 9, 10])
@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_drop_last_drops_only_a_short_global_batch(
    length: int, batch: int, drop_last: bool
) -> None:
    seen = flat(read(loader_feeds(DataLoader(Numbers(length), batch, drop_last=drop_last), 2)))
    kept = length - length % (2 * batch) if drop_last else length
    assert seen == list(range(kept))


def test_more_ranks_than_samples_leaves_some_idle() -> None:
    steps = list(
        zip(*(feed.epoch(0) for feed in loader_feeds(DataLoader(Numbers(5), 1), 4)), strict=True)
    )
    assert [[len(batches) for batches, _, _, _ in ranks] for ranks in steps] == [
        [1, 1, 1, 1],
        [1, 0, 0, 0],
    ]
    assert [ranks[0][3] for ranks in steps] == [False, True]


def test_gathered_batches_are_copies() -> None:
    data = TensorDataset(torch.arange(6.0))
    (feed,) = loader_feeds(DataLoader(data, 2), 1)
    for batches, _, _, _ in feed.epoch(0):
        batches[0][0].zero_()
    assert data.tensors[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_gathering_in_several_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allhands.data.feed.GATHER_BYTES", 50)
    assert (
        flat(read(loader_feeds(DataLoader(SETS["memory"], 2, shuffle=True), 2)))
        == global_order(23, 1, 0).tolist()
    )


def test_a_collate_function_is_used() -> None:
    feeds = loader_feeds(
        DataLoader(
            TensorDataset(torch.arange(6)),
            2,
            collate_fn=lambda rows: default_collate(rows)[0] + 100,
        ),
        2,
    )
    assert flat(read(feeds)) == [100, 101, 102, 103, 104, 105]


def test_a_custom_sampler_is_kept_with_its_repetitions() -> None:
    sampler = WeightedRandomSampler([0.0, 1.0, 1.0], 10)
    alone = flat(read(loader_feeds(DataLoader(Numbers(3), 2, sampler=sampler), 1)))
    assert len(alone) == 10
    assert set(alone) == {1, 2}
    again = flat(read(loader_feeds(DataLoader(Numbers(3), 2, sampler=sampler), 1)))
    assert alone == again, "drawn from (seed, epoch)"
    assert alone != flat(read(loader_feeds(DataLoader(Numbers(3), 2, sampler=sampler), 1), epoch=1))


def two_samplers() -> list[list[int]]:
    import allhands

    world = allhands.current_world()
    assert world is not None
    batches = BatchSampler(RandomSampler(range(11)), 3, drop_last=False)
    batches = type("Own", (BatchSampler,), {})(batches.sampler, 3, False)
    loaders = {
        "sampler": DataLoader(Numbers(11), 2, sampler=WeightedRandomSampler([1.0] * 11, 11)),
        "batches": DataLoader(Numbers(11), batch_sampler=batches),
    }
    feeds = build_feeds(sources_from_loaders(loaders), world, seed=1)
    return [
        [int(v) for batches, _, _, _ in feed.epoch(0) for batch in batches for v in batch]
        for feed in feeds.values()
    ]


@pytest.mark.serial
def test_samplers_are_drawn_once_for_all_ranks() -> None:
    by_rank = in_world(2, two_samplers)
    alone = in_world(1, two_samplers)[0]
    assert sorted(by_rank[0][0] + by_rank[1][0]) == sorted(alone[0])
    assert sorted(by_rank[0][1] + by_rank[1][1]) == list(range(11))


def test_batch_samplers_keep_their_batches_whole() -> None:
    class Odd(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0], [1, 2, 3], [4, 5], [6])

        def __len__(self) -> int:
            return 4

    loader = DataLoader(Numbers(7), batch_sampler=Odd(SequentialSampler(range(7)), 1, False))
    steps = [
        list(ranks)
        for ranks in zip(*(feed.epoch(0) for feed in loader_feeds(loader, 1)), strict=True)
    ]
    assert [[batch.tolist() for batch in ranks[0][0]] for ranks in steps] == [
        [[0]],
        [[1, 2, 3]],
        [[4, 5]],
        [[6]],
    ]
    assert [ranks[0][2] for ranks in steps] == [1, 3, 2, 1]


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_draw_differently_over_epochs_ranks_and_workers_and_repeat(
    persistent: bool,
) -> None:
    def draws() -> torch.Tensor:
        loader = DataLoader(Noise(), 2, num_workers=2, persistent_workers=persistent)
        rows = [
            batch
            for feed in loader_feeds(loader, 2)
            for epoch in (0, 1)
            for batches, _, _, _ in feed.epoch(epoch)
            for batch in batches
        ]
        return torch.cat(rows)

    first = draws()
    assert first.shape == (24, 3)
    assert len(set(first.flatten().tolist())) == 72
    assert torch.equal(first, draws())


def test_a_worker_init_function_is_called_even_for_tensors() -> None:
    calls = []
    loader = DataLoader(
        TensorDataset(torch.arange(4)), 2, num_workers=0, worker_init_fn=calls.append
    )
    (feed,) = loader_feeds(loader, 1)
    assert feed.kind != "in memory"


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [*SETS, "stream"])
def test_an_epoch_goes_on_after_any_sample_at_any_world_size(kind: str, size: int) -> None:
    if kind == "stream":
        loader: DataLoader[Any] = DataLoader(Stream(23), 2)
        size = 1  # more ranks compare what they read, and need a group
    else:
        loader = DataLoader(SETS[kind], 2, shuffle=True)
    whole = flat(read(loader_feeds(loader, 1), 1))
    for skip in range(len(whole) + 1):
        assert flat(read(loader_feeds(loader, size), 1, skip)) == whole[skip:]


@pytest.mark.parametrize("gathered", [1 << 20, 100])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_epoch_cuts_the_same_batches_at_the_same_places_in_memory(
    monkeypatch: pytest.MonkeyPatch, gathered: int, accumulate: int
) -> None:
    """The last bit of a matrix product depends on how its operands lie in memory; bit-for-bit
    resume depends on this."""
    monkeypatch.setattr("allhands.data.feed.GATHER_BYTES", gathered)
    data = TensorDataset(torch.arange(53 * 5, dtype=torch.float32).view(53, 5))
    sources = sources_from_loaders({"train": DataLoader(data, 3, shuffle=True)})
    for rank in range(2):
        fake = World(rank, 0, 0, 2, 1, torch.device("cpu"), "gloo", "test")
        feed = build_feeds(sources, fake, 0, accumulate, same_everywhere=True)["train"]
        whole = list(feed.epoch(0))
        for done in range(len(whole)):
            resumed = list(feed.epoch(0, done * 6 * accumulate))
            assert len(resumed) == len(whole) - done
            for (one, *_), (other, *_) in zip(whole[done:], resumed, strict=True):
                for (x,), (y,) in zip(one, other, strict=True):
                    assert torch.equal(x, y)
                    assert x.storage_offset() == y.storage_offset()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("count", [2, 10])
@pytest.mark.parametrize("data", [Numbers(40), Stream(40)], ids=["map", "stream"])
def test_loader_processes_end_with_the_epoch_or_with_the_feed(
    data: Any, count: int, persistent: bool
) -> None:
    loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=persistent)
    (feed,) = loader_feeds(loader, 1)
    steps = feed.epoch(0)
    for _ in range(count):
        next(steps)
    steps.close()
    stays = persistent and isinstance(data, Numbers)
    assert len(multiprocessing.active_children()) == (1 if stays else 0)
    feed.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("data", [*SETS.values(), Stream(23)], ids=[*SETS, "stream"])
def test_level_shares_give_every_rank_as_many_micro_batches(
    data: Any, size: int, accumulate: int
) -> None:
    """The samples are those of one process; a rank that is short of them gets a real sample that
    counts as none."""
    for batch in (2, 3):
        ranks = []
        for rank in range(size):
            sources = sources_from_loaders({"train": DataLoader(data, batch)})
            # Each rank stands for two of the world, as where a model's layers are cut over two.
            feeds = build_feeds(
                sources, world_of(0, 1), 1, accumulate, True, place=(rank, size), level=True
            )
            ranks.append(list(feeds["train"].epoch(0)))
        found: list[int] = []
        for step in zip(*ranks, strict=True):
            assert len({len(batches) for batches, _, _, _ in step}) == 1
            assert not any(idle for _, _, _, idle in step)
            assert {total for _, _, total, _ in step} == {
                sum(sum(counts) for _, counts, _, _ in step)
            }
            for batches, counts, _, _ in step:
                for rows, count in zip(batches, counts, strict=True):
                    values = rows[0] if isinstance(rows, (tuple, list)) else rows
                    assert len(values) == max(1, count)
                    found += [int(value) for value in values[:count]]
        assert found == list(range(23))


def test_level_shares_of_batches_that_a_sampler_has_made() -> None:
    made = [[0, 1], [2, 3, 4], [5]]
    for rank in range(4):
        sources = sources_from_loaders({"train": DataLoader(Numbers(6), batch_sampler=made)})
        (feed,) = build_feeds(
            sources, world_of(0, 1), 1, same_everywhere=True, place=(rank, 4), level=True
        ).values()
        ((batches, counts, total, idle),) = feed.epoch(0)
        assert [list(counts), total, idle] == [[len(made[rank]) if rank < 3 else 0], 6, False]
        assert [int(value) for value in batches[0]] == (made[rank] if rank < 3 else [0])


def test_an_epoch_of_many_samples_takes_eight_bytes_for_each() -> None:
    count = 300_000
    (feed,) = loader_feeds(DataLoader(Numbers(count), batch_size=100, shuffle=True), 1)
    tracemalloc.start()
    try:
        steps = feed.epoch(0)
        for _ in range(3):
            next(steps)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 * count / 4  # of Python's own; the order is a tensor
