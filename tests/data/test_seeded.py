"""Random draws of data sets: a function of seed, loader, epoch and position."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    default_collate,
    get_worker_info,
)

from allhands.data import build_feeds, preserved_generators, sources_from_loaders
from allhands.data.seeded import SeededDataset, seed_sample
from allhands.world import World
from tests.data.test_feed import world_of


class Noisy(Dataset[Any]):
    """Each sample is its index and a draw of each generator."""

    def __init__(self, length: int = 21) -> None:
        self.length = length
        self.scale = 1.0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [float(index), float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor(draws, dtype=torch.float64) * self.scale


class NoisyBatches(Noisy):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def rows(
    world: World, epoch: int = 0, skip: int = 0, data: Any = None, batch: int = 3, **options: Any
) -> torch.Tensor:
    """What a rank reads in an epoch, in order; columns: index, torch, numpy, random."""
    loader = DataLoader(data if data is not None else Noisy(), batch, shuffle=True, **options)
    feed = build_feeds(
        sources_from_loaders({"train": loader}), world, seed=7, same_everywhere=True
    )["train"]
    with preserved_generators():
        found = [batch for batches, _, _, _ in feed.epoch(epoch, skip) for batch in batches]
    return torch.cat(found)


def all_ranks(size: int, **given: Any) -> torch.Tensor:
    found = torch.cat([rows(world_of(rank, size), **given) for rank in range(size)])
    return found[found[:, 0].argsort()]


def test_draws_are_all_different_and_repeat() -> None:
    epochs = [rows(world_of(0, 1), epoch=epoch) for epoch in range(2)]
    for column in (1, 2, 3):
        values = torch.cat(epochs)[:, column].tolist()
        assert len(set(values)) == len(values) == 42
    assert torch.equal(epochs[0], rows(world_of(0, 1)))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("loader_processes", [0, 2])
def test_draws_do_not_depend_on_workers_or_loader_processes(
    size: int, loader_processes: int
) -> None:
    assert torch.equal(
        all_ranks(size, num_workers=loader_processes, batch=6 // size), all_ranks(1, batch=6)
    )


@pytest.mark.parametrize("loader_processes", [0, 2])
def test_an_epoch_that_goes_on_gives_the_tail_of_the_whole_one(loader_processes: int) -> None:
    for rank in range(2):
        world = world_of(rank, 2)
        whole = rows(world, num_workers=loader_processes)
        taken = len(rows(world)) - len(rows(world, skip=6))
        assert torch.equal(rows(world, skip=6, num_workers=loader_processes), whole[taken:])


def test_epochs_reach_loader_processes_that_stay() -> None:
    loader = DataLoader(Noisy(), 3, shuffle=True, num_workers=1, persistent_workers=True)
    feed = build_feeds(sources_from_loaders({"train": loader}), world_of(0, 1), seed=7)["train"]
    for epoch in range(2):
        found = torch.cat([batch for batches, _, _, _ in feed.epoch(epoch) for batch in batches])
        assert torch.equal(found, rows(world_of(0, 1), epoch=epoch))


def test_a_sample_that_is_drawn_twice_is_augmented_differently() -> None:
    sampler = RandomSampler(range(2), replacement=True, num_samples=12)
    loader = DataLoader(Noisy(2), 3, sampler=sampler)
    feed = build_feeds(sources_from_loaders({"train": loader}), world_of(0, 1), seed=7)["train"]
    found = torch.cat([batch for batches, _, _, _ in feed.epoch(0) for batch in batches])
    assert len(set(found[:, 1].tolist())) == 12


def test_dropouts_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    loader = DataLoader(
        Noisy(), 3, shuffle=True, collate_fn=lambda samples: torch.stack(samples) * torch.rand(())
    )
    feed = build_feeds(sources_from_loaders({"train": loader}), world_of(0, 1), seed=7)["train"]
    next(iter(feed.epoch(0)))
    assert torch.equal(torch.rand(4), expected)


def test_a_data_set_that_fetches_batches_is_asked_for_batches_and_seeded_for_each() -> None:
    whole = rows(world_of(0, 1), data=NoisyBatches())
    assert torch.equal(whole, rows(world_of(0, 1), data=NoisyBatches(), num_workers=2))
    assert torch.equal(rows(world_of(0, 1), data=NoisyBatches(), skip=6), whole[6:])
    assert len(set(whole[:, 1].tolist())) == 21


def mixing(samples: list[torch.Tensor]) -> torch.Tensor:
    return default_collate(samples) + torch.rand(()) + np.random.rand() + random.random()


def test_a_collate_function_that_draws_draws_the_same_wherever_it_runs() -> None:
    here = rows(world_of(0, 1), collate_fn=mixing)
    assert torch.equal(here, rows(world_of(0, 1), collate_fn=mixing, num_workers=2))
    assert torch.equal(here[6:], rows(world_of(0, 1), collate_fn=mixing, skip=6))
    assert not torch.equal(here, rows(world_of(0, 1), collate_fn=mixing, epoch=1))


class NoisyStream(IterableDataset[Any]):
    """21 numbers in a random order, each with a draw of each generator; numpy's normal draws come
    in pairs."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.sample, torch.randperm(21).tolist())

    @staticmethod
    def sample(index: int) -> torch.Tensor:
        return torch.tensor(
            [index, float(torch.rand(())), np.random.randn(), random.gauss(0, 1)],
            dtype=torch.float64,
        )


def stream(
    skip: int = 0, draws_between: int = 0, epoch: int = 0, size: int = 3, **options: Any
) -> torch.Tensor:
    """What is read of a stream while the training draws `draws_between` times a step."""
    loader = DataLoader(NoisyStream(), size, **options)
    feed = build_feeds(sources_from_loaders({"train": loader}), world_of(0, 1), seed=7)["train"]
    found = []
    with preserved_generators():
        for batches, _, _, _ in feed.epoch(epoch, skip):
            found += batches
            for _ in range(draws_between):
                torch.rand(()), np.random.randn(), random.random()
    return torch.cat(found)


@pytest.mark.parametrize("collate", [None, mixing])
@pytest.mark.parametrize("loader_processes", [0, 1])
def test_a_stream_draws_the_same_wherever_it_is_read_and_after_an_interruption(
    loader_processes: int, collate: Any
) -> None:
    whole = stream(collate_fn=collate)
    if collate is None:
        assert sorted(whole[:, 0].tolist()) == list(range(21))
        assert not torch.equal(whole, stream(epoch=1))
    for draws_between in (0, 3):
        read = stream(draws_between=draws_between, num_workers=loader_processes, collate_fn=collate)
        assert torch.equal(read, whole)
        read = stream(6, draws_between, num_workers=loader_processes, collate_fn=collate)
        assert torch.equal(read, whole[6:])


def test_a_stream_is_the_same_in_batches_of_any_size() -> None:
    assert torch.equal(stream(size=4), stream(size=3))
    assert torch.equal(stream(size=4, skip=5), stream(size=3)[5:])


def test_a_stream_leaves_the_trainings_generators_alone() -> None:
    def draws() -> list[float]:
        return [float(torch.rand(())), np.random.randn(), random.gauss(0, 1)]

    feed = build_feeds(
        sources_from_loaders({"train": DataLoader(NoisyStream(), 3)}), world_of(0, 1), seed=7
    )["train"]
    with preserved_generators():
        seed_sample(1, 0)
        expected = [draws() for _ in range(7)]
        seed_sample(1, 0)
        assert [draws() for _ in feed.epoch(0)] == expected


def double(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.dataset.length == 21
    info.dataset.scale = 2.0


def test_a_worker_init_fn_reaches_the_users_data_set() -> None:
    doubled = rows(world_of(0, 1), num_workers=1, worker_init_fn=double)
    assert torch.equal(doubled, 2.0 * rows(world_of(0, 1)))


def test_the_wrapper_travels_to_other_processes() -> None:
    copy = pickle.loads(pickle.dumps(SeededDataset(Noisy(5))))
    assert (len(copy), copy.length) == (5, 5)


def test_neighbouring_positions_and_seeds_are_unrelated() -> None:
    with preserved_generators():
        values = []
        for seed in range(30):
            for position in range(30):
                seed_sample(seed, position)
                values.append([float(torch.rand(())), float(np.random.rand()), random.random()])
    table = torch.tensor(values)
    assert len(table.unique(dim=0)) == 900
    assert torch.allclose(table.mean(0), torch.full((3,), 0.5), atol=0.05)
    neighbours = torch.stack([table[:-1, 0], table[1:, 0]])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 0.1
