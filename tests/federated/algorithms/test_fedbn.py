"""FedBN."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated.algorithms import FedAvg, FedBN
from allhands.federated.personal import own_numbers
from tests.federated import simulating as sim

SIZES = (8, 6)


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_it_equals_the_loop_by_hand(executor):
    """Two clients, three rounds, one full step of SGD each: layers of normalisation never leave a
    client."""
    made = sim.rounds(FedBN(), net=net(), who=sim.clients(SIZES), number=3, executor=executor)
    (x, y), parts = sim.data(), [torch.arange(8), torch.arange(8, 14)]
    models = [net(), net()]
    for _ in range(3):
        for model, part in zip(models, parts, strict=True):
            model.zero_grad()
            nn.functional.mse_loss(model(x[part]), y[part]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
        states = [model.state_dict() for model in models]
        for name in states[0]:
            if not name.startswith("1."):
                shared = (8 * states[0][name] + 6 * states[1][name]) / 14
                for state in states:
                    state[name].copy_(shared)
    made.run()
    for client, model in enumerate(models):
        row = made.server.start(made.states.get([client]))[0]
        assert (row - made.server.layout.read(model)).abs().max() < 1e-12
    assert not torch.equal(models[0][1].running_mean, models[1][1].running_mean)


def test_the_global_model_keeps_the_layers_that_it_began_with():
    made = sim.rounds(FedBN(), net=net(), who=sim.clients(SIZES), number=2)
    start, own = made.server.weights.clone(), made.server.own
    made.run()
    moved = made.server.weights != start
    assert not moved[own].any()
    assert moved.any()


def test_fedavg_averages_statistics_by_samples_and_counters_to_whole_numbers():
    """19, 7 and 1 steps by 38, 14 and 3 samples."""
    made = sim.rounds(
        FedAvg(), net=net(), who=sim.clients((38, 14, 3)), number=1, batch_size=2, drop_last=True
    )
    layout, place = made.server.layout, made.server.layout.buffers[0]
    means = []
    kept = made.algorithm.contribute

    def contribute(trained, server, sums):
        means.append((trained.samples[0], trained.rows[0, place.start : place.stop].clone()))
        kept(trained, server, sums)

    made.algorithm.contribute = contribute  # type: ignore[method-assign]
    made.run()
    expected = sum(n * value for n, value in means) / 55
    assert (layout.state_dict(made.server.weights)["1.running_mean"] - expected).abs().max() < 1e-12
    assert made.server.integers.tolist() == [round((38 * 19 + 14 * 7 + 3 * 1) / 55)]


def test_a_model_without_normalisation_is_refused():
    with pytest.raises(UserError, match="no layer of normalisation"):
        sim.rounds(FedBN())


def test_statistics_that_need_their_counter_are_refused():
    model = nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 1)
    ).double()
    with pytest.raises(UserError, match="'1' has momentum=None"):
        sim.rounds(FedBN(), net=model)
    assert own_numbers(["0"], model, sim.rounds(net=model).server.layout).numel() == 24
