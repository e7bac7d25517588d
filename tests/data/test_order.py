from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from allhands.data import (
    Dealer,
    derive_seed,
    global_order,
    preserved_generators,
    seed_everything,
    share_of,
)


def test_order_is_a_function_of_seed_and_epoch_only() -> None:
    first = global_order(50, seed=1, epoch=0)
    torch.manual_seed(99)
    assert torch.equal(first, global_order(50, seed=1, epoch=0))
    assert not torch.equal(first, global_order(50, seed=1, epoch=1))
    assert not torch.equal(first, global_order(50, seed=2, epoch=0))
    assert sorted(first.tolist()) == list(range(50))


def test_drawing_an_order_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    global_order(50, seed=1, epoch=0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 12, 13])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_shares_cover_everything_once_and_differ_by_at_most_one(
    length: int, world_size: int
) -> None:
    shares = [share_of(length, rank, world_size) for rank in range(world_size)]
    assert [position for a, b in shares for position in range(a, b)] == list(range(length))
    sizes = [b - a for a, b in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("items", "batch", "world_size", "accumulate", "drop_last"),
    list(itertools.product((1, 5, 8, 9, 10, 23, 64), (2, 5), (1, 2, 3), (1, 3), (False, True))),
)
def test_dealing_gives_every_item_once_at_any_world_size(
    items: int, batch: int, world_size: int, accumulate: int, drop_last: bool
) -> None:
    dealer = Dealer(items, batch, world_size, accumulate, drop_last)
    by_rank = [list(dealer.shares(rank)) for rank in range(world_size)]
    assert {len(shares) for shares in by_rank} == {dealer.num_steps}
    seen = []
    for step in zip(*by_rank, strict=True):
        assert sum(sum(share.sizes) for share in step) == step[0].total
        for share in step:
            assert all(0 < size <= batch for size in share.sizes)
            assert len(share.sizes) <= accumulate
            seen += range(share.start, share.start + sum(share.sizes))
    kept = items - items % dealer.global_batch if drop_last else items
    assert seen == list(range(kept))


@pytest.mark.parametrize("items", [9, 17, 22, 24, 26])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_one_process_sees_the_batches_of_a_dataloader(items: int, accumulate: int) -> None:
    expected = [len(batch) for batch in DataLoader(range(items), batch_size=4)]
    shares = Dealer(items, batch_size=4, accumulate=accumulate).shares(0)
    assert [size for share in shares for size in share.sizes] == expected


@pytest.mark.parametrize(
    ("items", "level", "expected"),
    [
        (12, False, [(4, 2), (4, 2)]),
        (11, False, [(4, 2), (3, 2)]),  # a rest of one sample is evened out
        (10, False, [(3, 2), (3, 2)]),
        (9, False, [(3, 2), (4,)]),
        (9, True, [(3, 2), (2, 2)]),
        (8, True, [(4,), (4,)]),
        (1, True, [(1,), (0,)]),
    ],
)
def test_several_workers_cut_a_short_share_alike_but_leave_no_single_sample(
    items: int, level: bool, expected: list[Any]
) -> None:
    dealer = Dealer(items, batch_size=4, world_size=2, accumulate=2, level=level)
    assert [share.sizes for rank in range(2) for share in dealer.shares(rank)] == expected


def test_derived_seeds_do_not_collide() -> None:
    seeds = {
        derive_seed(s, p, e, r)
        for s in range(5)
        for p in ("train", "loader")
        for e in range(20)
        for r in range(8)
    }
    assert len(seeds) == 5 * 2 * 20 * 8
    assert derive_seed(1, "a", 2) == derive_seed(1, "a", 2)


def test_generators_are_preserved() -> None:
    import random

    import numpy as np

    seed_everything(3)
    expected = (torch.rand(2).tolist(), np.random.rand(), random.random())
    seed_everything(3)
    with preserved_generators():
        seed_everything(8)
        torch.rand(5)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == expected


@pytest.mark.parametrize("left", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_global_batch_stays_when_workers_are_lost(left: int, accumulate: int) -> None:
    """Each step has the samples that it would have had with those that began."""
    began = Dealer(103, 4, world_size=4, accumulate=accumulate)
    now = Dealer(103, 4, world_size=left, accumulate=accumulate, began_with=4)
    assert now.num_steps == began.num_steps
    for step in range(began.num_steps):
        then = [list(began.shares(rank))[step] for rank in range(4)]
        here = [list(now.shares(rank))[step] for rank in range(left)]
        assert {share.total for share in here} == {then[0].total}
        taken = [
            position
            for share in here
            for position in range(share.start, share.start + sum(share.sizes))
        ]
        first = step * began.global_batch
        assert taken == list(range(first, first + then[0].total))
        assert all(size <= 4 for share in here for size in share.sizes)
