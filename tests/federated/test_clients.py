"""Clients: their samples, names and test splits."""

from __future__ import annotations

import numpy as np
import pytest

from allhands.errors import UserError
from allhands.federated.clients import Clients
from allhands.federated.partitions import iid


def test_every_client_is_split_on_its_own():
    whole = Clients([range(10), range(10, 13), [13]], ["a", "b", "c"])
    train, tests = whole.split(0.4, seed=1)
    assert train.sizes.tolist() == [6, 2, 1]
    assert tests.sizes.tolist() == [4, 1, 0]
    assert train.names == tests.names == ["a", "b", "c"]
    for client in range(3):
        both = sorted([*train.samples(client).tolist(), *tests.samples(client).tolist()])
        assert both == sorted(whole.samples(client).tolist())
        for part in (train, tests):
            assert part.samples(client).tolist() == sorted(part.samples(client).tolist())
    again, other = whole.split(0.4, seed=1)[1], whole.split(0.4, seed=2)[1]
    assert again.indices.equal(tests.indices)
    assert not other.indices.equal(tests.indices)


def test_a_client_alone_is_split_as_among_all():
    whole = Clients([range(10), range(10, 60), range(60, 83)])
    train, tests = whole.split(0.3, seed=5)
    for client in range(3):
        held = whole.samples(client).numpy()
        offsets = np.where(np.arange(4) > client, len(held), 0)
        alone = Clients.from_arrays(np.arange(len(held)), offsets).split(0.3, seed=5)
        for part, expected in zip(alone, (train, tests), strict=True):
            assert held[part.samples(client).numpy()].tolist() == expected.samples(client).tolist()


def test_every_place_is_as_likely_to_be_tested():
    tests = Clients.from_arrays(np.arange(200_000), np.arange(0, 200_001, 10)).split(0.2)[1]
    places = np.bincount(tests.indices.numpy() % 10, minlength=10)
    assert places.sum() == 40_000
    assert np.abs(places - 4_000).max() < 5 * 57  # standard deviations of a fifth of 20,000 draws
    clients = np.bincount(tests.indices.numpy() // 10, minlength=20_000)
    assert set(clients) == {2}
    pairs = tests.indices.view(-1, 2).sort(1).values % 10
    counts = np.unique(pairs.numpy(), axis=0, return_counts=True)[1]
    assert len(counts) == 45
    assert np.abs(counts - 20_000 / 45).max() < 5 * 21


def test_a_hundred_thousand_clients_are_split_at_once():
    train, tests = iid(1_000_000, 100_000).split(0.2)
    assert set(train.sizes) == {8}
    assert set(tests.sizes) == {2}
    assert np.array_equal(
        np.sort(np.concatenate([train.indices, tests.indices])), np.arange(1_000_000)
    )


@pytest.mark.parametrize("fraction", [0, 1, 1.5, "half"])
def test_a_fraction_that_is_none_is_refused(fraction):
    with pytest.raises(UserError, match="test_fraction=.*above 0 and below 1"):
        Clients([range(10)]).split(fraction)


def test_clients_too_small_for_a_test_are_told():
    with pytest.raises(
        UserError, match="at most 3 samples gives none a test sample; write a larger fraction"
    ):
        Clients([range(3), range(3, 5)]).split(0.2)


def test_names_are_one_a_client_and_different():
    with pytest.raises(UserError, match="1 names for 2 clients"):
        Clients([[0], [1]], ["a"])
    with pytest.raises(UserError, match="two clients are called 'a'"):
        Clients([[0], [1]], ["a", "a"])
