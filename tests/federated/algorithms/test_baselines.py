"""Baselines: no sharing, and no clients."""

from __future__ import annotations

import itertools

import pytest
import torch

from allhands.federated.algorithms import Centralised, LocalOnly
from tests.federated import simulating as sim
from tests.federated.algorithms.by_hand import LOCAL, batches, learn, weights_of


@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_alone_every_client_trains_its_own_model_whenever_it_is_chosen(executor):
    made = sim.rounds(LocalOnly(), number=4, per_round=2, executor=executor, **LOCAL)
    start = made.server.weights.clone()
    models = [weights_of(made) for _ in range(len(made.clients))]
    for round_ in range(4):
        for client in made.select(round_):
            models[client] = learn(models[client], batches(made, round_, client))
    history = made.run()
    assert torch.equal(made.server.weights, start)
    assert history["unchanged"] == [False] * 4
    for client, model in enumerate(models):
        row = made.server.layout.state_dict(made.server.start(made.states.get([client]))[0])
        assert max(float((row[name] - value).abs().max()) for name, value in model.items()) < 1e-12


def test_centralised_with_all_clients_is_training_on_all_data():
    made = sim.rounds(Centralised(), number=2, **LOCAL)
    assert (len(made.clients), made.per_round) == (1, 1)
    weights = weights_of(made)
    for round_ in range(2):
        steps = batches(made, round_, 0)
        assert [sum(map(len, steps)), len(steps)] == [2 * 55, 2 * 14]
        assert sorted(torch.cat(steps[:14]).tolist()) == list(range(55))
        weights = learn(weights, steps)
    made.run()
    assert (made.server.weights - made.server.layout.read(sim.model())).abs().max() > 0
    assert (
        max(float((value - weights[name]).abs().max()) for name, value in weights_of(made).items())
        < 1e-12
    )


@pytest.mark.parametrize(
    "local",
    [
        {"batch_size": 4, "epochs": 2},
        {"batch_size": 4, "epochs": 2, "drop_last": True},
        {"batch_size": 4, "steps": 6},
        {"batch_size": None, "epochs": 3},
    ],
)
def test_centralised_sees_as_many_samples_as_an_average_cohort(local):
    """Over all cohorts of 2 of 4 clients, counted one by one."""
    federated, made = (
        sim.rounds(per_round=2, **local),
        sim.rounds(Centralised(), per_round=2, **local),
    )
    each = [sum(map(len, batches(federated, 0, client))) for client in range(4)]
    cohorts = [sum(pair) for pair in itertools.combinations(each, 2)]
    seen = sum(map(len, batches(made, 0, 0)))
    assert abs(seen - sum(cohorts) / len(cohorts)) <= 4
