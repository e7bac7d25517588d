"""What clients keep from one of their rounds to the next."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from allhands.federated import client_states as module
from allhands.federated.client_states import ClientStates
from tests.federated.simulating import CPU


def states(rank: int = 0, size: int = 1) -> ClientStates:
    return ClientStates(
        {"c": 3, "h": 2}, torch.float64, CPU, SimpleNamespace(rank=rank, world_size=size)
    )  # type: ignore[arg-type]


def test_clients_begin_with_zeros_and_get_copies_of_what_they_have_put():
    kept = states()
    own = kept.get([4, 2])
    assert own["c"].tolist() == [[0.0] * 3] * 2
    own["c"][0] += 1.0
    own["h"][1] += 5.0
    kept.put([4, 2], own)
    own["c"] += 100.0
    again = kept.get([2, 4])
    assert again["c"].tolist() == [[0.0] * 3, [1.0] * 3]
    assert again["h"].tolist() == [[5.0] * 2, [0.0] * 2]


def test_vectors_travel_to_the_rank_that_trains_next_also_of_a_client_that_has_never_trained(
    monkeypatch,
):
    letters: list[torch.Tensor] = []

    def deliver(operations):
        for kind, tensor, _ in operations:
            letters.append(tensor.clone()) if kind == "isend" else tensor.copy_(letters.pop(0))
        return []

    fake = SimpleNamespace(
        isend="isend", irecv="irecv", P2POp=lambda *given: given, batch_isend_irecv=deliver
    )
    monkeypatch.setattr(module, "dist", fake)
    ranks = [states(0, 2), states(1, 2)]
    for rank in ranks:
        rank.move({1: 0, 2: 0})
    own = ranks[0].get([1])
    own["c"] += 7.0
    ranks[0].put([1], own)  # client 2 failed and has put nothing
    for rank in ranks:
        rank.move({1: 1, 2: 1})
    assert ranks[1].get([1, 2])["c"].tolist() == [[7.0] * 3, [0.0] * 3]
    assert 1 not in ranks[0].kept
    assert ranks[0].owner == ranks[1].owner == {1: 1, 2: 1}


def test_what_two_ranks_kept_goes_on_on_three_and_on_one():
    parts = []
    for rank in (0, 1):
        kept = states(rank, 2)
        clients = [rank, rank + 2]
        own = kept.get(clients)
        own["h"] += torch.tensor(clients, dtype=torch.float64)[:, None]
        kept.put(clients, own)
        parts.append(kept.state_dict())
    for size in (1, 3):
        ranks = [states(rank, size) for rank in range(size)]
        for kept in ranks:
            kept.load_state_dict([*parts, {}])
        assert all(kept.owner == ranks[0].owner for kept in ranks)
        assert sorted(client for kept in ranks for client in kept.kept) == [0, 1, 2, 3]
        for client, owner in ranks[0].owner.items():
            assert ranks[owner].get([client])["h"].tolist() == [[float(client)] * 2]
