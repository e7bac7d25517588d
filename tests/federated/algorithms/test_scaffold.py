"""SCAFFOLD."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated.algorithms import FedAvg, Scaffold
from allhands.federated.clients import Clients
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
from tests.federated.executors.comparing import SIZES, difference, images, network


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
            after = {
                n: own[client][n] - server[n] - update[n] / (0.1 * len(steps)) for n in weights
            }
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
    assert (
        max(
            float((kept[p.start : p.stop].view(p.shape) - own[3][p.name]).abs().max())
            for p in made.server.layout.parameters
        )
        < 1e-12
    )


def test_its_first_round_is_fedavg():
    for weighted in (False, True):
        runs = [
            sim.rounds(kind, number=1, **LOCAL)
            for kind in (Scaffold(weighted=weighted), FedAvg(weighted))
        ]
        for made in runs:
            made.run()
        assert same(*runs) < 1e-11  # PyTorch's kernels without vectors: 1.3e-12


def test_the_servers_control_is_the_mean_of_all_clients_whoever_takes_part():
    made = sim.rounds(Scaffold(), number=5, per_round=2, **LOCAL)
    made.run()
    everyone = list(range(len(made.clients)))
    deviations = made.states.get(everyone)["control"] - made.algorithm.control
    assert deviations.sum(0).abs().max() < 1e-12
    assert made.algorithm.control.abs().max() > 1e-3


@pytest.mark.parametrize(
    "executor", ["serial", "stacked", {"name": "stacked", "chunk": 3}], ids=str
)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_by_option_1_a_control_is_the_gradient_of_the_clients_mean_loss_at_the_servers_weights(
    executor, batch_size
):
    """Clients of unequal size, of which two take part in each round: those of the last keep their
    gradient at its beginning."""
    made = sim.rounds(
        Scaffold(option="I"),
        number=3,
        per_round=2,
        executor=executor,
        batch_size=batch_size,
        epochs=2,
    )
    (x, y), net, seen = sim.data(), sim.model(), dict[int, torch.Tensor]()
    while made.server.round < 3:
        made.server.layout.write(made.server.weights, net)
        made.one_round()
        for client in made.history["cohort"][-1]:
            net.zero_grad()
            nn.functional.mse_loss(
                net(x[made.clients.samples(client)]), y[made.clients.samples(client)]
            ).backward()
            seen[client] = torch.cat([p.grad.flatten() for p in net.parameters()])
    kept = made.states.get(list(range(len(made.clients))))["control"]
    for client, row in enumerate(kept):
        found = torch.cat([row[p.start : p.stop] for p in made.server.layout.parameters])
        assert (found - seen.get(client, torch.zeros(()))).abs().max() < 1e-12
    assert len(seen) >= 3
    assert (kept.mean(0) - made.algorithm.control).abs().max() < 1e-12


def test_option_1_equals_the_loop_by_hand():
    made = sim.rounds(Scaffold(option="I", server_lr=0.9), number=3, **LOCAL)
    weights, everyone = weights_of(made), range(len(made.clients))
    server = {name: torch.zeros_like(value) for name, value in weights.items()}
    own = [dict(server) for _ in everyone]
    for round_ in range(3):
        updates, controls = [], []
        for client in everyone:

            def correct(gradients, _, before=own[client], common=server):
                return {name: g - before[name] + common[name] for name, g in gradients.items()}

            updates.append(
                minus(learn(weights, batches(made, round_, client), correct=correct), weights)
            )
            step = learn(weights, [made.clients.samples(client)], lr=1.0)
            controls.append(minus(weights, step))
        moved = mean(updates, [1.0] * 4)
        weights = {name: value + 0.9 * moved[name] for name, value in weights.items()}
        server, own = mean(controls, [1.0] * 4), controls
    made.run()
    assert apart(made, weights) < 1e-12


def test_option_1_measures_without_dropout_and_leaves_statistics_alone():
    given = {"norm": "batch", "number": 3, "batch_size": 3, "drop_last": True, "epochs": 2}
    for algorithm in (
        Scaffold(option="I", average_buffers=True),
        Scaffold(option="I", average_buffers=True, weighted=True),
    ):
        assert (
            difference(
                ["serial", "stacked", {"name": "stacked", "chunk": 2}], algorithm=algorithm, **given
            )
            < 1e-12
        )
    made = sim.rounds(
        Scaffold(option="I", average_buffers=True),
        net=network("batch"),
        given=images(),
        who=sim.clients(SIZES),
        criterion=nn.CrossEntropyLoss(),
        number=1,
        batch_size=None,
    )
    (x, y), net = images(), network("batch").eval()
    nn.functional.cross_entropy(net(x[:10]), y[:10]).backward()
    made.run()
    kept = made.states.get([0])["control"][0]
    for place in made.server.layout.parameters:
        expected = dict(net.named_parameters())[place.name].grad
        assert (kept[place.start : place.stop].view(place.shape) - expected).abs().max() < 1e-12


def test_option_1_leaves_the_layers_of_clients_uncorrected():
    made = sim.rounds(Scaffold(option="I"), number=2, stages={"local_layers": ["2"]}, **LOCAL)
    made.run()
    own = made.server.layout.mask(["2.weight", "2.bias"])
    kept = made.states.get([0, 1, 2, 3])["control"]
    assert kept[:, own[: kept.shape[1]]].abs().max() == 0
    assert made.algorithm.control[~own[: kept.shape[1]]].abs().max() > 1e-3


def test_with_one_full_step_a_control_is_the_clients_gradient():
    made = sim.rounds(Scaffold(), number=1)
    (x, y), net = sim.data(), sim.model()
    for client in range(len(made.clients)):
        net.zero_grad()
        nn.functional.mse_loss(
            net(x[made.clients.samples(client)]), y[made.clients.samples(client)]
        ).backward()
    made.run()
    last = torch.cat([p.grad.flatten() for p in net.parameters()])
    kept = made.states.get([3])["control"][0]
    assert (
        torch.cat([kept[p.start : p.stop] for p in made.server.layout.parameters]) - last
    ).abs().max() < 1e-12


class Point(nn.Module):
    """One number, whose loss with a sample (a, b) is a quadratic with curvature a and minimum b."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return samples[:, :1] * (self.x - samples[:, 1:]) ** 2 / 2


def test_it_ends_at_the_optimum_of_two_quadratics_where_fedavg_does_not():
    """Curvatures 1 and 4, minima 0 and 1: the optimum is 4/5; FedAvg ends where pulls of ten steps
    balance."""
    samples = torch.tensor([[1.0, 0.0], [4.0, 1.0]], dtype=torch.float64)
    ends = []
    for algorithm in (FedAvg(), Scaffold()):
        made = sim.rounds(
            algorithm,
            net=Point(),
            given=(samples, torch.zeros(2)),
            who=Clients([[0], [1]]),
            number=60,
            epochs=10,
            criterion=lambda output, _: output.mean(),
            options={"lr": 0.1},
        )
        made.run()
        ends.append(float(made.server.weights[0]))
    left = [
        (1 - 0.1 * curvature) ** 10 for curvature in (1.0, 4.0)
    ]  # of the distance, after ten steps
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
        sim.rounds(
            Scaffold(momentum=how),
            net=Line(),
            given=data,
            who=Clients([[0], [1]]),
            number=1,
            epochs=6,
            criterion=lambda output, _: output.mean(),
            options=options,
        )
        for how in ("counted", "ignored")
    ]
    for one in made:
        one.run()
    assert made[0].states.get([0, 1])["control"][:, 0].tolist() == pytest.approx(
        [2.0, 5.0], abs=1e-12
    )
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
    sim.rounds(Scaffold(option="I"), optimizer=torch.optim.Adam)
    with pytest.raises(UserError, match="momentum='half'"):
        Scaffold(momentum="half")
    with pytest.raises(UserError, match="option='III'.*'I' or 'II'"):
        Scaffold(option="III")
    with pytest.raises(UserError, match="momentum='ignored' with option='I'"):
        Scaffold(option="I", momentum="ignored")
