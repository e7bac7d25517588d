"""SCAFFOLD."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated.algorithms import FedAvg, Scaffold
from allhands.federated.clients import Clients
from tests.federated import simulating as sim
from tests.federated.algorithms.by_hand import LOCAL, apart, batches, learn, mean, minus, same, weights_of


@pytest.mark.parametrize("weighted", [False, True])
def test_it_equals_the_loop_by_hand(weighted):
    made = sim.rounds(Scaffold(server_lr=0.9, weighted=weighted), number=3, **LOCAL)
    weights, everyone = weights_of(made), range(len(made.clients))
    server = {name: torch.zeros_like(value) for name, value in weights.items()}
    own = [dict(server) for _ in everyone]
    shares = [float(made.clients.size(client)) if weighted else 1.0 for client in everyone]
    for round_ in range(3):
        updates, changes = [], []
        for client in everyone:
            steps = batches(made, round_, client)

            def correct(gradients, _, before=own[client], common=server):
                return {name: g - before[name] + common[name] for name, g in gradients.items()}

            update = minus(learn(weights, steps, correct=correct), weights)
            after = {n: own[client][n] - server[n] - update[n] / (0.1 * len(steps)) for n in weights}
            changes.append(minus(after, own[client]))
            updates.append(update)
            own[client] = after
        moved, changed = mean(updates, shares), mean(changes, shares)
        weights = {name: value + 0.9 * moved[name] for name, value in weights.items()}
        server = {name: value + changed[name] for name, value in server.items()}
    made.run()
    assert apart(made, weights) < 1e-12
    # Client 3 has one batch of 3, twice: what it keeps is its mean gradient.
    kept = made.states.get([3])["control"][0]
    assert max(float((kept[p.start : p.stop].view(p.shape) - own[3][p.name]).abs().max())
               for p in made.server.layout.parameters) < 1e-12  # fmt: skip


def test_its_first_round_is_fedavg():
    for weighted in (False, True):
        runs = [sim.rounds(kind, number=1, **LOCAL) for kind in (Scaffold(weighted=weighted), FedAvg(weighted))]
        for made in runs:
            made.run()
        assert same(*runs) < 1e-12


def test_the_servers_control_is_the_mean_of_all_clients_whoever_takes_part():
    made = sim.rounds(Scaffold(), number=5, per_round=2, **LOCAL)
    made.run()
    everyone = list(range(len(made.clients)))
    deviations = made.states.get(everyone)["control"] - made.algorithm.control
    assert deviations.sum(0).abs().max() < 1e-12
    assert made.algorithm.control.abs().max() > 1e-3


def test_with_one_full_step_a_control_is_the_clients_gradient():
    made = sim.rounds(Scaffold(), number=1)
    (x, y), net = sim.data(), sim.model()
    for client in range(len(made.clients)):
        net.zero_grad()
        nn.functional.mse_loss(net(x[made.clients.samples(client)]), y[made.clients.samples(client)]).backward()
    made.run()
    last = torch.cat([p.grad.flatten() for p in net.parameters()])
    kept = made.states.get([3])["control"][0]
    assert (torch.cat([kept[p.start : p.stop] for p in made.server.layout.parameters]) - last).abs().max() < 1e-12


class Point(nn.Module):
    """One number, whose loss with a sample (a, b) is a quadratic with curvature a and minimum b."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return samples[:, :1] * (self.x - samples[:, 1:]) ** 2 / 2


def test_it_ends_at_the_optimum_of_two_quadratics_where_fedavg_does_not():
    """Curvatures 1 and 4, minima 0 and 1: the optimum is 4/5; FedAvg ends where pulls of ten steps balance."""
    samples = torch.tensor([[1.0, 0.0], [4.0, 1.0]], dtype=torch.float64)
    ends = []
    for algorithm in (FedAvg(), Scaffold()):
        made = sim.rounds(algorithm, net=Point(), given=(samples, torch.zeros(2)), who=Clients([[0], [1]]), number=60, epochs=10,
                          criterion=lambda output, _: output.mean(), options={"lr": 0.1})  # fmt: skip
        made.run()
        ends.append(float(made.server.weights[0]))
    left = [(1 - 0.1 * curvature) ** 10 for curvature in (1.0, 4.0)]  # of the distance, after ten steps
    assert ends[0] == pytest.approx((1 - left[1]) / ((1 - left[0]) + (1 - left[1])), abs=1e-12)
    assert abs(ends[0] - 0.8) > 0.1
    assert ends[1] == pytest.approx(0.8, abs=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_momentum_a_control_is_still_a_mean_of_gradients(nesterov):
    """A gradient that does not change must come out as it is."""
    samples = torch.tensor([[2.0], [5.0]], dtype=torch.float64)

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, slopes: torch.Tensor) -> torch.Tensor:
            return slopes * self.x

    data, options = (samples, torch.zeros(2)), {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    made = [
        sim.rounds(Scaffold(momentum=how), net=Line(), given=data, who=Clients([[0], [1]]), number=1, epochs=6,
                   criterion=lambda output, _: output.mean(), options=options)
        for how in ("counted", "ignored")
    ]  # fmt: skip
    for one in made:
        one.run()
    assert made[0].states.get([0, 1])["control"][:, 0].tolist() == pytest.approx([2.0, 5.0], abs=1e-12)
    assert made[1].states.get([0])["control"][0, 0] > 4.0


def test_its_state_goes_on_where_it_was():
    whole, first, second = (sim.rounds(Scaffold(), number=number, **LOCAL) for number in (4, 2, 4))
    whole.run()
    first.run()
    second.server.weights.copy_(first.server.weights)
    second.server.round = 2
    second.algorithm.load_state_dict(first.algorithm.state_dict())
    second.states.load_state_dict([first.states.state_dict()])
    second.run()
    assert torch.equal(whole.server.weights, second.server.weights)


def test_other_optimizers_are_refused():
    with pytest.raises(UserError, match="SGD.*Adam"):
        sim.rounds(Scaffold(), optimizer=torch.optim.Adam)
    with pytest.raises(UserError, match="momentum='half'"):
        Scaffold(momentum="half")
