"""Optimizers on the server."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated.algorithms import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedOpt, FedYogi
from tests.federated import simulating as sim
from tests.federated.algorithms.by_hand import LOCAL, apart, average, batches, learn, same


def by_hand(made, server, number=3):
    return average(
        made,
        number,
        lambda weights, round_, client: learn(weights, batches(made, round_, client)),
        server,
    )


@pytest.mark.parametrize("kind", [FedAdagrad, FedYogi, FedAdam])
def test_the_adaptive_ones_equal_the_loop_by_hand(kind):
    made = sim.rounds(kind(server_lr=0.05, beta1=0.7, tau=0.01), number=3, **LOCAL)
    m: dict[str, torch.Tensor] = {}
    v: dict[str, torch.Tensor] = {}

    def server(weights, update):
        for name, delta in update.items():
            m[name] = 0.7 * m.get(name, torch.zeros_like(delta)) + 0.3 * delta
            old, square = v.get(name, torch.full_like(delta, 0.01**2)), delta**2
            v[name] = {
                FedAdagrad: old + square,
                FedYogi: old - 0.01 * square * torch.sign(old - square),
                FedAdam: 0.99 * old + 0.01 * square,
            }[kind]
        return {
            name: value + 0.05 * m[name] / (v[name].sqrt() + 0.01)
            for name, value in weights.items()
        }

    expected = by_hand(made, server)
    made.run()
    assert apart(made, expected) < 1e-11  # 1 / (sqrt(v) + tau) magnifies the rounding of the sums


def test_momentum_on_the_server_equals_the_loop_by_hand():
    made = sim.rounds(FedAvgM(momentum=0.8, server_lr=0.5), number=3, **LOCAL)
    velocity: dict[str, torch.Tensor] = {}

    def server(weights, update):
        velocity.update(
            {n: 0.8 * velocity.get(n, torch.zeros_like(d)) + d for n, d in update.items()}
        )
        return {name: value + 0.5 * velocity[name] for name, value in weights.items()}

    expected = by_hand(made, server)
    made.run()
    assert apart(made, expected) < 1e-12


@pytest.mark.parametrize(
    "algorithm", [FedOpt("SGD"), FedOpt("sgd", {"lr": 1.0}), FedAvgM(momentum=0)]
)
def test_steps_of_one_along_the_mean_update_are_fedavg(algorithm):
    runs = [sim.rounds(kind, number=3, **LOCAL) for kind in (algorithm, FedAvg())]
    for made in runs:
        made.run()
    assert same(*runs) < 1e-15


def test_any_optimizer_of_torch_on_the_server_equals_itself_on_the_model():
    made = sim.rounds(FedOpt("AdamW", {"lr": 0.01, "weight_decay": 0.1}), number=3, **LOCAL)
    net = sim.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)

    def server(weights, update):
        for name, parameter in net.named_parameters():
            parameter.grad = -update[name]
        optimizer.step()
        return {name: value.detach().clone() for name, value in net.named_parameters()}

    expected = by_hand(made, server)
    made.run()
    assert apart(made, expected) < 1e-10


def test_fedadam_is_not_adam_of_torch():
    """Its first step is lr * 0.1 u / (sqrt(0.99 tau^2 + 0.01 u^2) + tau); torch's is lr * u / (|u|
    + eps)."""
    mine, torchs = (
        FedAdam(server_lr=0.1, tau=0.1),
        FedOpt("Adam", {"lr": 0.1, "betas": (0.9, 0.99), "eps": 0.1}),
    )
    made = [sim.rounds(kind, number=1, **LOCAL) for kind in (mine, torchs)]
    start = made[0].server.weights.clone()
    reference = sim.rounds(number=1, **LOCAL)
    for one in (*made, reference):
        one.run()
    update = reference.server.weights - start
    expected = 0.1 * 0.1 * update / ((0.99 * 0.01 + 0.01 * update**2).sqrt() + 0.1)
    assert (made[0].server.weights - start - expected).abs().max() < 1e-12
    assert same(*made) > 1e-3


@pytest.mark.parametrize(
    "algorithm", [FedAvgM, FedAdagrad, FedYogi, FedAdam, lambda: FedOpt("Adam")]
)
def test_its_state_goes_on_where_it_was(algorithm):
    whole, first, second = (sim.rounds(algorithm(), number=number, **LOCAL) for number in (4, 2, 4))
    whole.run()
    first.run()
    second.server.weights.copy_(first.server.weights)
    second.server.round = 2
    second.algorithm.load_state_dict(first.algorithm.state_dict())
    second.run()
    assert torch.equal(whole.server.weights, second.server.weights)


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(UserError, match="LBFGS"):
        FedOpt("LBFGS")
    with pytest.raises(UserError, match="rate"):
        FedOpt("Adam", {"rate": 1.0})
    with pytest.raises(UserError, match="tau"):
        FedAdam(tau=0)
    with pytest.raises(UserError, match="beta1"):
        FedYogi(beta1=1.0)


def test_statistics_are_averaged_by_samples_whatever_the_optimizer_and_only_when_asked():
    def net():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    with pytest.raises(UserError, match=r"'1\.running_mean'.*GroupNorm.*average_buffers=True"):
        sim.rounds(FedAdam(), net=net())
    runs = [
        sim.rounds(kind, net=net(), number=1) for kind in (FedAdam(average_buffers=True), FedAvg())
    ]
    for made in runs:
        made.run()
    trained = runs[0].server.layout.trained
    assert torch.equal(runs[0].server.weights[trained:], runs[1].server.weights[trained:])
    assert not torch.equal(runs[0].server.weights[:trained], runs[1].server.weights[:trained])
    assert math.isclose(runs[0].server.integers.item(), 1)
