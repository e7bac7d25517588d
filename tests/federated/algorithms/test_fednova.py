"""FedNova."""

from __future__ import annotations

import pytest
import torch

from allhands.errors import UserError
from allhands.federated.algorithms import FedAvg, FedNova
from allhands.federated.algorithms.fednova import gradient_weight
from tests.federated import simulating as sim
from tests.federated.algorithms.by_hand import (
    LOCAL,
    apart,
    batches,
    learn,
    mean,
    minus,
    same,
    weights_of,
)

PLAIN = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "nesterov": False}


def test_gradient_weights_are_the_papers():
    assert gradient_weight(7, PLAIN) == 7.0
    rho = 0.9  # momentum: a = [1 - rho^tau, …, 1 - rho] / (1 - rho)
    assert gradient_weight(7, PLAIN | {"momentum": rho}) == pytest.approx(
        (7 - rho * (1 - rho**7) / (1 - rho)) / (1 - rho), rel=1e-14
    )
    alpha = 0.1 * 0.5  # proximal: a = [(1 - alpha)^(tau - 1), …, 1]
    assert gradient_weight(7, PLAIN, mu=0.5) == pytest.approx(
        (1 - (1 - alpha) ** 7) / alpha, rel=1e-14
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.8},
        {"momentum": 0.8, "dampening": 0.3},
        {"momentum": 0.8, "nesterov": True},
    ],
)
@pytest.mark.parametrize("mu", [0.0, 0.4])
def test_gradient_weights_are_what_torch_does_with_gradients_of_one(options, mu):
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1, **options)
    for _ in range(9):
        x.grad = 1.0 + mu * x.detach()
        optimizer.step()
    assert gradient_weight(9, PLAIN | options, mu) == pytest.approx(
        float(-x.detach() / 0.1), rel=1e-13
    )


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.6, 0.0), (0.0, 0.5)])
def test_it_equals_the_loop_by_hand(momentum, mu):
    made = sim.rounds(FedNova(mu=mu), number=2, options={"lr": 0.1, "momentum": momentum}, **LOCAL)
    weights, everyone = weights_of(made), range(len(made.clients))
    shares = [made.clients.size(client) / 55 for client in everyone]
    for round_ in range(2):
        updates, applied = [], []
        for client in everyone:
            steps = batches(made, round_, client)

            def correct(gradients, own, start=weights):
                return {n: g + mu * (own[n] - start[n]) for n, g in gradients.items()}

            update = minus(learn(weights, steps, momentum=momentum, correct=correct), weights)
            tau = len(steps)
            if momentum:
                a = [(1 - momentum ** (tau - k)) / (1 - momentum) for k in range(tau)]
            else:
                a = [(1 - 0.1 * mu) ** (tau - 1 - k) for k in range(tau)]
            applied.append(sum(a))
            updates.append({name: value / sum(a) for name, value in update.items()})
        effective, direction = (
            sum(p * a for p, a in zip(shares, applied, strict=True)),
            mean(updates, shares),
        )
        weights = {name: value + effective * direction[name] for name, value in weights.items()}
    made.run()
    assert apart(made, weights) < 1e-12


def test_with_equal_steps_it_is_fedavg_and_with_others_not():
    equal = [sim.rounds(kind, number=3, batch_size=4, steps=5) for kind in (FedNova(), FedAvg())]
    others = [sim.rounds(kind, number=3, **LOCAL) for kind in (FedNova(), FedAvg())]
    for made in (*equal, *others):
        made.run()
    assert same(*equal) < 1e-12
    assert same(*others) > 1e-4


def test_what_it_cannot_count_is_refused():
    with pytest.raises(UserError, match="AdamW"):
        sim.rounds(FedNova(), optimizer=torch.optim.AdamW)
