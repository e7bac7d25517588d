"""The rounds: parity with loops written by hand, and what a round depends on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.federated import simulating as sim

pytestmark = pytest.mark.usefixtures("world")


def row(net: nn.Module, like) -> torch.Tensor:
    return like.server.layout.read(net)


def test_fedavg_equals_the_loop_by_hand_on_unequal_clients():
    made = sim.rounds(number=3)
    parts = [made.clients.samples(client) for client in range(len(made.clients))]
    made.run()
    expected = sim.loop(sim.model(), parts, sim.data(), 3, 0.1)
    assert (row(expected, made) - made.server.weights).abs().max() < 1e-12


def test_one_full_batch_step_of_all_clients_is_one_step_on_all_samples():
    made, net, (x, y) = sim.rounds(number=5), copy.deepcopy(sim.model()), sim.data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    made.run()
    assert (row(net, made) - made.server.weights).abs().max() < 1e-12


def test_a_repeated_run_is_the_same_to_the_bit_and_another_seed_is_not():
    first, again, other = (
        sim.rounds(per_round=2, number=4, batch_size=4, epochs=2, seed=seed)
        for seed in (42, 42, 43)
    )
    histories = [made.run() for made in (first, again, other)]
    assert torch.equal(first.server.weights, again.server.weights)
    assert histories[0]["cohort"] == histories[1]["cohort"]
    assert histories[0]["train"] == histories[1]["train"]
    assert histories[0]["cohort"] != histories[2]["cohort"]
    assert not torch.equal(first.server.weights, other.server.weights)
