from __future__ import annotations

import itertools

import pytest
import torch

from allhands.data import Dealer, derive_seed, global_order, preserved_generators, seed_everything, share_of


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
def test_shares_cover_everything_once_and_differ_by_at_most_one(length: int, world_size: int) -> None:
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


def test_a_short_share_is_cut_evenly() -> None:
    (share,) = Dealer(9, batch_size=8, accumulate=2).shares(0)
    assert share.sizes == (5, 4)


def test_derived_seeds_do_not_collide() -> None:
    seeds = {derive_seed(s, p, e, r) for s in range(5) for p in ("train", "loader") for e in range(20) for r in range(8)}
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
