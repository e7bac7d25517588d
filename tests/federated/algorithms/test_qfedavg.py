"""q-FedAvg."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from allhands.errors import UserError
from allhands.federated.algorithms import FedAvg, QFedAvg
from tests.federated import simulating as sim
from tests.federated.algorithms.by_hand import (
    LOCAL,
    apart,
    average,
    batches,
    learn,
    minus,
    weights_of,
)


def losses(made, weights):
    (x, y), net = sim.data(), sim.model()
    parts = [made.clients.samples(client) for client in range(len(made.clients))]
    return [
        float(nn.functional.mse_loss(functional_call(net, weights, x[part]), y[part]))
        for part in parts
    ]


@pytest.mark.parametrize("executor", ["serial", "stacked"])
@pytest.mark.parametrize(("q", "lipschitz"), [(2.0, None), (0.5, 3.0)])
def test_it_equals_the_loop_by_hand(q, lipschitz, executor):
    made = sim.rounds(QFedAvg(q, lipschitz), number=2, executor=executor, **LOCAL)
    weights, bound = weights_of(made), lipschitz or 1 / 0.1
    for round_ in range(2):
        above = {name: torch.zeros_like(value) for name, value in weights.items()}
        below = 0.0
        for client, loss in enumerate(losses(made, weights)):
            learnt = learn(weights, batches(made, round_, client))
            step = {name: bound * value for name, value in minus(weights, learnt).items()}
            square = float(sum((value**2).sum() for value in step.values()))
            above = {name: value + loss**q * step[name] for name, value in above.items()}
            below += q * loss ** (q - 1) * square + bound * loss**q
        weights = {name: value - above[name] / below for name, value in weights.items()}
    made.run()
    assert apart(made, weights) < 1e-12


def test_with_q_0_it_is_the_plain_mean():
    made, plain = (
        sim.rounds(kind, number=3, **LOCAL) for kind in (QFedAvg(0), FedAvg(weighted=False))
    )
    expected = average(
        made,
        3,
        lambda weights, round_, client: learn(weights, batches(made, round_, client)),
        weighted=False,
    )
    made.run()
    plain.run()
    assert apart(made, expected) < 1e-12
    assert apart(plain, expected) < 1e-11  # shares of samples, not of clients, are what is rounded


def test_a_larger_q_makes_losses_more_even():
    spread = []
    for q in (0.0, 5.0):
        made = sim.rounds(QFedAvg(q), number=80, epochs=1, options={"lr": 0.1})
        made.run()
        spread.append(torch.tensor(losses(made, weights_of(made))).max().item())
    assert spread[1] < spread[0]


def test_a_loss_that_is_no_number_leaves_the_client_out_though_its_model_is_fine():
    def criterion(output, target):
        return (
            (output - target).square().mean()
            if torch.is_grad_enabled()
            else target.mean() * target.amax().mul(1e308 * 10)
        )

    made = sim.rounds(QFedAvg(1), criterion=criterion, number=1, stages={"on_bad_update": "skip"})
    start = made.server.weights.clone()
    assert made.run()["skipped"] == [[0, 1, 2, 3]]
    assert torch.equal(made.server.weights, start)


def test_losses_below_0_are_refused():
    made = sim.rounds(QFedAvg(1), criterion=lambda output, target: (output - target).mean() - 100)
    with pytest.raises(UserError, match="negative"):
        made.run()
