"""The user's own samplers across an interruption: the same order goes on, and later epochs too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from allhands import UserError
from allhands.data import Feed, build_feeds, sources_from_loaders
from tests.data.test_feed import world_of

SAMPLES = 23
DATA = TensorDataset(torch.arange(SAMPLES))


def feed_of(loader: DataLoader[Any]) -> Feed:
    return build_feeds(sources_from_loaders({"train": loader}), world_of(0, 1), seed=7)["train"]


def read(feed: Feed, epoch: int, skip: int = 0) -> list[list[int]]:
    return [
        [int(i) for batch in batches for i in batch[0]]
        for batches, _, _, _ in feed.epoch(epoch, skip)
    ]


class Remembers:
    """A sampler that keeps its own state, as resumable samplers do."""

    def __init__(self) -> None:
        self.calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter([(i * (self.calls + 1)) % SAMPLES for i in range(SAMPLES)])

    def __len__(self) -> int:
        return SAMPLES

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def with_generator() -> DataLoader[Any]:
    return DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(3))


def weighted() -> DataLoader[Any]:
    weights = torch.arange(1.0, SAMPLES + 1)
    sampler = WeightedRandomSampler(
        weights.tolist(), SAMPLES, generator=torch.Generator().manual_seed(3)
    )
    return DataLoader(DATA, 4, sampler=sampler)


def batches() -> DataLoader[Any]:
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(3))
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, drop_last=False))


class Uneven(BatchSampler):
    """Batches of 1, 2, 3, …, so that it is not taken for PyTorch's own."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for size in (1, 2, 3, 4, 5, 8):
            yield [order.pop() for _ in range(size)]

    def __len__(self) -> int:
        return 6


def uneven() -> DataLoader[Any]:
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(3))
    return DataLoader(DATA, batch_sampler=Uneven(sampler, 4, drop_last=False))


def remembering() -> DataLoader[Any]:
    return DataLoader(DATA, 4, sampler=Remembers())


def remembering_batches() -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=Uneven(Remembers(), 4, drop_last=False))


MAKERS = [with_generator, weighted, batches, uneven, remembering, remembering_batches]


@pytest.mark.parametrize("make", MAKERS)
def test_an_interrupted_epoch_goes_on_in_its_order_and_later_ones_are_the_same(make: Any) -> None:
    whole = feed_of(make())
    expected = [read(whole, epoch) for epoch in range(4)]
    assert expected[0] != expected[1]
    for done in range(len(expected[1]) + 1):
        first = feed_of(make())
        read(first, 0)
        steps = first.epoch(1)
        for _ in range(done):
            next(steps)
        state = first.state_dict(within_epoch=True) if done else None
        if state is None:
            continue
        resumed = feed_of(make())
        resumed.load_state_dict(state)
        skip = sum(map(len, expected[1][:done]))
        assert read(resumed, 1, skip) == expected[1][done:]
        assert [read(resumed, epoch) for epoch in (2, 3)] == expected[2:]


@pytest.mark.parametrize("make", MAKERS)
def test_between_epochs_only_the_generator_is_kept(make: Any) -> None:
    whole = feed_of(make())
    expected = [read(whole, epoch) for epoch in range(3)]
    first = feed_of(make())
    assert read(first, 0) == expected[0]
    state = first.state_dict(within_epoch=False)
    assert "order" not in state
    resumed = feed_of(make())
    resumed.load_state_dict(state)
    assert [read(resumed, epoch) for epoch in (1, 2)] == expected[1:]


def test_batches_that_end_elsewhere_are_refused() -> None:
    with pytest.raises(
        UserError,
        match="cannot go on after 2 samples: its batch sampler now makes batches that end after 1, "
        "3, 6",
    ):
        read(feed_of(uneven()), 0, skip=2)
