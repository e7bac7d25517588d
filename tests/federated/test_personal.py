"""Layers that clients keep, their evaluation, and updates that are no numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import allhands
from allhands.errors import UserError
from allhands.federated.algorithms import (
    ALGORITHMS,
    FedAdam,
    FedAvg,
    FedNova,
    FedProx,
    LocalOnly,
    Scaffold,
)
from allhands.federated.clients import Clients
from allhands.federated.rounds import BadUpdateError
from tests.federated import simulating as sim
from tests.worlds import in_world

LOCAL = {"batch_size": 4, "epochs": 2}

pytestmark = pytest.mark.usefixtures("world")


def head(made, client):
    return made.server.layout.state_dict(made.server.start(made.states.get([client])).view(-1))


@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_own_layers_equal_the_loop_by_hand(executor):
    made = sim.rounds(number=3, executor=executor, stages={"local_layers": ["2"]})
    (x, y), everyone = sim.data(), range(len(made.clients))
    models = [sim.model() for _ in everyone]
    parts = [made.clients.samples(client) for client in everyone]
    for _ in range(3):
        for model, part in zip(models, parts, strict=True):
            model.zero_grad()
            nn.functional.mse_loss(model(x[part]), y[part]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
        states = [model.state_dict() for model in models]
        for name in ("0.weight", "0.bias"):
            shared = (
                sum(len(part) * state[name] for part, state in zip(parts, states, strict=True)) / 55
            )
            for state in states:
                state[name].copy_(shared)
    made.run()
    for client, model in enumerate(models):
        assert (
            made.server.start(made.states.get([client]))[0] - made.server.layout.read(model)
        ).abs().max() < 1e-12


@pytest.mark.parametrize("algorithm", [FedProx(0.1), FedAdam(), Scaffold(), FedNova()])
def test_under_any_algorithm_own_layers_stay_with_the_clients(algorithm):
    made = sim.rounds(algorithm, number=4, per_round=2, stages={"local_layers": ["2.*"]}, **LOCAL)
    start = made.server.weights.clone()
    made.run()
    moved = made.server.weights != start
    assert not moved[made.server.own].any()
    assert moved.any()
    trained = sorted({client for cohort in made.history["cohort"] for client in cohort})
    heads = [head(made, client)["2.weight"] for client in trained]
    assert all(not torch.equal(heads[0], other) for other in heads[1:])


def test_names_that_are_none_are_refused():
    with pytest.raises(UserError, match="nothing called 'hed'"):
        sim.rounds(stages={"local_layers": ["hed"]})
    with pytest.raises(UserError, match="nothing is shared; write algorithm='local_only'"):
        sim.rounds(stages={"local_layers": ["*"]})
    with pytest.raises(UserError, match=r"write \['head'\]"):
        allhands.federated.Federated(local_layers="head")


def test_clients_own_models_are_measured_on_their_own_test_samples():
    tests = Clients([range(4), range(10, 13), [], [54]])
    made = sim.rounds(LocalOnly(), number=2, stages={"tests": tests}, **LOCAL)
    history = made.run()
    (x, y), net, total = sim.data(), sim.model(), 0.0
    for client in (0, 1, 3):
        made.server.layout.write(made.server.start(made.states.get([client]))[0], net)
        with torch.no_grad():
            total += float(
                nn.functional.mse_loss(net(x[tests.samples(client)]), y[tests.samples(client)])
            ) * tests.size(client)
    assert history["clients"]["loss"][-1] == pytest.approx(total / 8, abs=1e-12)
    assert "accuracy" not in history["clients"]
    with pytest.raises(UserError, match="2 samples of 2 clients, and 4 clients are trained"):
        sim.rounds(stages={"tests": Clients([[0], [1]])})


def test_accuracy_where_targets_are_classes():
    x, _ = sim.data()
    y = (x.sum(1) > 0).long()
    torch.manual_seed(1)
    net = nn.Linear(5, 2).double()
    made = sim.rounds(
        FedAvg(),
        net=net,
        given=(x, y),
        criterion=nn.CrossEntropyLoss(),
        number=2,
        stages={"tests": sim.clients()},
        **LOCAL,
    )
    history = made.run()
    made.server.layout.write(made.server.weights, net)
    assert history["clients"]["accuracy"][-1] == pytest.approx(
        float((net(x).argmax(1) == y).double().mean()), abs=1e-12
    )


@pytest.mark.parametrize("executor", ["serial", "stacked"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "qfedavg", "fedadam", "fednova"])
def test_a_client_that_diverges_is_left_out_as_if_it_had_not_been_there(
    algorithm, executor, capsys
):
    """Client 1 overflows; the others' mean is what it would be without."""
    x, y = sim.data()
    y = y.clone()
    y[sim.clients().samples(1)] = 1e200  # its square is infinite in a later step
    made, others = (
        sim.rounds(
            ALGORITHMS[algorithm](),
            given=data,
            number=2,
            executor=executor,
            criterion=quartic,
            kind=kind,
            stages={"on_bad_update": "skip"},
            batch_size=None,
            epochs=2,
        )
        for data, kind in (((x, y), sim.Rounds), (sim.data(), WithoutOne))
    )
    history = made.run()
    assert history["skipped"] == [[1], [1]]
    assert "client 1 came out with NaN or Inf, left out" in capsys.readouterr().out
    others.run()
    assert (made.server.weights - others.server.weights).abs().max() < 1e-12
    assert made.server.weights.isfinite().all()


class WithoutOne(sim.Rounds):
    """All clients but 1."""

    def select(self, round_):
        return [0, 2, 3]


def quartic(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that is a number where targets are huge, and whose gradient overflows after a step."""
    return (output - target).abs().clamp(max=1e150).square().mean() + (output * target).mean()


@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_the_run_ends_and_names_the_client_unless_told_otherwise(executor):
    x, y = sim.data()
    y = y.clone()
    y[sim.clients().samples(1)] = 1e200
    made = sim.rounds(given=(x, y), criterion=quartic, executor=executor, epochs=2)
    start = made.server.weights.clone()
    with pytest.raises(
        BadUpdateError, match="client 1 came out with NaN or Inf.*on_bad_update='skip'"
    ):
        made.run()
    assert torch.equal(made.server.weights, start)
    with pytest.raises(UserError, match="on_bad_update='ignore'"):
        sim.rounds(stages={"on_bad_update": "ignore"})


def test_a_round_in_which_all_have_failed_keeps_the_model_and_says_so(capsys):
    x, y = sim.data()
    made = sim.rounds(
        given=(x, torch.full_like(y, 1e200)),
        criterion=quartic,
        epochs=2,
        number=2,
        stages={"on_bad_update": "skip"},
    )
    start = made.server.weights.clone()
    history = made.run()
    assert torch.equal(made.server.weights, start)
    assert history["unchanged"] == [True, True]
    assert history["skipped"] == [[0, 1, 2, 3]] * 2
    assert (
        capsys.readouterr().out.count(
            "no client of 4 has brought an update; the model stays as it was"
        )
        == 2
    )


def _run(names: list[str]) -> list[torch.Tensor]:
    rows = []
    for name in names:
        stages = {"local_layers": ["2"], "tests": sim.clients()}
        made = sim.rounds(ALGORITHMS[name](), number=3, per_round=3, stages=stages, **LOCAL)
        history = made.run()
        rows += [made.server.weights, torch.tensor(history["clients"]["loss"], dtype=torch.float64)]
    return rows


@pytest.mark.serial
def test_two_ranks_give_the_bits_of_one():
    names = ["fedavg", "scaffold", "qfedavg", "fednova", "fedyogi"]
    expected = _run(names)
    for rows in in_world(2, _run, names):
        for row, one in zip(rows[::2], expected[::2], strict=True):
            assert torch.equal(row, one)
        for row, one in zip(rows[1::2], expected[1::2], strict=True):
            assert (row - one).abs().max() < 1e-12


def test_a_models_weights_are_left_alone_while_clients_train():
    net = sim.model()
    before = copy.deepcopy(net.state_dict())
    sim.rounds(net=net, number=1, stages={"local_layers": ["2"]}).run()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def runner_trained(**options):
    """A training by `SupervisedRunner` in this process; its history and model."""
    net, (x, y) = sim.model(), sim.data()
    history = allhands.SupervisedRunner().train(
        model=net,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        verbose=False,
        datasets={"batch_size": 4, "train": torch.utils.data.TensorDataset(x, y)},
        workers=1,
        distributed=allhands.federated.Federated(clients=4, rounds=2, **options),
    )
    return history, net


@pytest.mark.serial
def test_the_runner_passes_everything_on():
    history, _ = runner_trained(algorithm="centralised", per_round=2, test_fraction=0.2)
    assert history["cohort"] == [[0], [0]]
    assert len(history["clients"]["loss"]) == 2
    _, net = runner_trained(local_layers=["2"])
    start = sim.model().state_dict()
    same = {name: torch.equal(value, start[name]) for name, value in net.state_dict().items()}
    assert same == {"0.weight": False, "0.bias": False, "2.weight": True, "2.bias": True}
    with pytest.raises(UserError, match="nothing called 'head'"):
        runner_trained(local_layers=["head"])
    with pytest.raises(UserError, match="takes: mu, weighted"):
        runner_trained(algorithm={"name": "fedprox", "nu": 1})
