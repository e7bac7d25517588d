"""FedProx."""

from __future__ import annotations

import pytest
import torch

from allhands.errors import UserError
from allhands.federated.algorithms import FedAvg, FedProx
from tests.federated import simulating as sim
from tests.federated.algorithms.by_hand import LOCAL, apart, average, batches, learn


def test_it_equals_the_loop_by_hand():
    made = sim.rounds(FedProx(mu=0.3), number=2, **LOCAL)

    def learnt(weights, round_, client):
        def correct(gradients, own):
            return {name: g + 0.3 * (own[name] - weights[name]) for name, g in gradients.items()}

        return learn(weights, batches(made, round_, client), correct=correct)

    expected = average(made, 2, learnt)
    made.run()
    assert apart(made, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_its_term_it_is_fedavg_to_the_bit(dtype):
    runs = [
        sim.rounds(
            algorithm, net=sim.model(dtype=dtype), given=sim.data(dtype=dtype), number=2, **LOCAL
        )
        for algorithm in (FedProx(mu=0), FedAvg())
    ]
    for made in runs:
        made.run()
    assert torch.equal(runs[0].server.weights, runs[1].server.weights)


def test_the_larger_the_term_the_less_clients_move():
    moved = []
    for mu in (0.0, 0.5, 2.0, 5.0):
        made = sim.rounds(FedProx(mu=mu), number=1, **LOCAL)
        start = made.server.weights.clone()
        made.run()
        moved.append(float((made.server.weights - start).norm()))
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 0.9 * moved[0]


@pytest.mark.parametrize("mu", [-1, "much", True, float("nan")])
def test_a_term_that_is_none_is_refused(mu):
    with pytest.raises(UserError, match="mu="):
        FedProx(mu=mu)
