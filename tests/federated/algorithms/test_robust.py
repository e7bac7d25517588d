"""Median, trimmed mean and Krum."""

from __future__ import annotations

import itertools

import pytest
import torch

from allhands.errors import UserError
from allhands.federated.algorithms import FedAvg, Krum, Median, TrimmedMean
from allhands.federated.algorithms.base import Algorithm
from allhands.federated.clients import Clients
from tests.federated import simulating as sim
from tests.federated.algorithms.by_hand import LOCAL, batches, learn, minus, weights_of
from tests.worlds import in_world

SIZES = (10, 6, 12, 9, 7, 8, 3)


def updates_of(made, weights, round_):
    learnt = [
        minus(learn(weights, batches(made, round_, client)), weights)
        for client in range(len(made.clients))
    ]
    return {name: torch.stack([one[name] for one in learnt]) for name in weights}


def median(updates):
    return {name: torch.quantile(rows, 0.5, dim=0) for name, rows in updates.items()}


def trimmed(updates):
    return {name: rows.sort(0).values[2:-2].mean(0) for name, rows in updates.items()}


def krum(updates, count):
    flat = torch.cat([rows.flatten(1) for rows in updates.values()], 1)
    scores = [
        sum(
            sorted(float(((one - other) ** 2).sum()) for j, other in enumerate(flat) if j != i)[
                : 7 - 2 - 2
            ]
        )
        for i, one in enumerate(flat)
    ]
    best = sorted(range(7), key=lambda i: scores[i])[:count]
    return {name: rows[best].mean(0) for name, rows in updates.items()}


RULES = [
    (Median(), median),
    (TrimmedMean(beta=0.3), trimmed),
    (Krum(byzantine=2), lambda updates: krum(updates, 1)),
    (Krum(byzantine=2, select=3), lambda updates: krum(updates, 3)),
]


@pytest.mark.parametrize("executor", ["serial", "stacked"])
@pytest.mark.parametrize(
    ("algorithm", "rule"), RULES, ids=["median", "trimmed", "krum", "multi-krum"]
)
def test_it_equals_the_loop_by_hand(algorithm, rule, executor):
    made = sim.rounds(algorithm, who=sim.clients(SIZES), number=2, executor=executor, **LOCAL)
    weights = weights_of(made)
    for round_ in range(2):
        update = rule(updates_of(made, weights, round_))
        weights = {name: value + update[name] for name, value in weights.items()}
    made.run()
    assert (
        max(float((value - weights[name]).abs().max()) for name, value in weights_of(made).items())
        < 1e-12
    )


def test_median_of_an_even_number_is_between_the_two_in_the_middle():
    made = sim.rounds(Median(), number=1, **LOCAL)
    weights = weights_of(made)
    rows = {name: one.sort(0).values for name, one in updates_of(made, weights, 0).items()}
    made.run()
    for name, value in weights_of(made).items():
        assert (value - weights[name] - (rows[name][1] + rows[name][2]) / 2).abs().max() < 1e-12


@pytest.mark.parametrize("algorithm", [Median(), TrimmedMean(beta=0.3), Krum(2), Krum(2, select=5)])
def test_two_wrong_clients_of_seven_spoil_nothing_and_spoil_fedavg(algorithm):
    """Targets of two clients are a million times too large."""
    x, y = sim.data()
    y = y.clone()
    y[:16] *= 1e6
    moved = []
    for kind in (algorithm, FedAvg()):
        made = sim.rounds(kind, given=(x, y), who=sim.clients(SIZES), number=2)
        start = made.server.weights.clone()
        made.run()
        moved.append(float((made.server.weights - start).abs().max()))
    assert moved[0] < 1.0
    assert moved[1] > 1e3


def test_trimming_nothing_is_the_plain_mean():
    runs = [
        sim.rounds(kind, number=2, **LOCAL)
        for kind in (TrimmedMean(beta=0), FedAvg(weighted=False))
    ]
    for made in runs:
        made.run()
    assert (runs[0].server.weights - runs[1].server.weights).abs().max() < 1e-11


def test_a_client_that_is_left_out_counts_nowhere():
    """The first client's update is NaN; the median is of the others."""
    x, y = sim.data()
    y = y.clone()
    y[3] = float("nan")
    made = sim.rounds(
        Median(),
        given=(x, y),
        who=sim.clients(SIZES),
        number=1,
        stages={"on_bad_update": "skip"},
        **LOCAL,
    )
    weights = weights_of(made)
    rows = {name: one[1:] for name, one in updates_of(made, weights, 0).items()}
    made.run()
    expected = median(rows)
    assert (
        max(float((v - weights[n] - expected[n]).abs().max()) for n, v in weights_of(made).items())
        < 1e-12
    )


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(UserError, match="at least 7 clients.*there are 4; write byzantine=0"):
        sim.rounds(Krum(byzantine=2))
    with pytest.raises(UserError, match="select=4"):
        sim.rounds(Krum(byzantine=0, select=5))
    with pytest.raises(UserError, match=r"beta=0\.1 of 4 clients"):
        sim.rounds(TrimmedMean(beta=0.1))
    with pytest.raises(UserError, match="below 0.5|less than 0.5"):
        TrimmedMean(beta=0.5)


def _run(algorithms: list[Algorithm], per_round: int) -> list[torch.Tensor]:
    rows = []
    for algorithm in algorithms:
        # More numbers than one block, so that all ranks have some.
        made = sim.rounds(
            algorithm, net=_wide(), who=_clients(), number=2, per_round=per_round, batch_size=4
        )
        made.run()
        rows.append(made.server.weights)
    return rows


def _wide() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 6000), torch.nn.Tanh(), torch.nn.Linear(6000, 1)
    ).double()


def _clients() -> Clients:
    bounds = torch.tensor([0, *SIZES]).cumsum(0).tolist()
    return Clients([range(a, b) for a, b in itertools.pairwise(bounds)])


@pytest.mark.serial
def test_two_and_three_ranks_give_the_bits_of_one():
    kinds = [Median(), TrimmedMean(0.3), Krum(1, select=2)]
    expected = _run(kinds, 6)
    for workers in (2, 3):
        for rows in in_world(workers, _run, kinds, 6):
            assert all(torch.equal(row, one) for row, one in zip(rows, expected, strict=True))
