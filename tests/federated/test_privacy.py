"""Differential privacy: what a client can contribute at most, the noise, and the figures of the
accountant."""

from __future__ import annotations

import math

import pytest
import torch

from allhands.errors import UserError
from allhands.federated import Federated
from allhands.federated.algorithms import FedAvg, Median, Scaffold
from allhands.federated.privacy import Privacy
from allhands.federated.update_compression import Coded
from tests.federated import simulating as sim

pytestmark = pytest.mark.usefixtures("world")


def rounds(
    *, number: int = 3, per_round: int | None = None, algorithm=None, clients: int = 4, **options
):
    privacy = Privacy(**{"clip": math.inf, "noise_multiplier": 0.0, "sampling": "fixed", **options})
    who = sim.clients((5,) * clients)
    return sim.rounds(
        algorithm or FedAvg(weighted=False),
        number=number,
        per_round=per_round,
        who=who,
        given=sim.data(5 * clients),
        stages={"privacy": privacy},
    )


def test_without_bound_and_noise_it_is_the_plain_mean():
    private, plain = (
        rounds(per_round=3),
        sim.rounds(
            FedAvg(weighted=False), who=sim.clients((5,) * 4), given=sim.data(20), per_round=3
        ),
    )
    private.run()
    plain.run()
    assert (private.server.weights - plain.server.weights).abs().max() < 1e-12
    assert private.history["epsilon"] == [math.inf] * 3


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_no_client_moves_the_model_by_more_than_the_bound(sampling):
    made = rounds(clip=0.01, sampling=sampling, per_round=2, number=8)
    for _ in range(8):
        before = made.server.weights.clone()
        made.one_round()
        came = len(made.history["cohort"][-1])
        assert torch.linalg.vector_norm(made.server.weights - before) <= came * 0.01 / 2 * (
            1 + 1e-9
        )
    alone = rounds(clip=0.01, clients=1, number=1)
    before = alone.server.weights.clone()
    alone.run()  # whose update is longer
    assert float(torch.linalg.vector_norm(alone.server.weights - before)) == pytest.approx(0.01)


def test_noise_is_of_the_size_that_was_asked_for_and_the_same_again():
    made, again, other = (
        rounds(clip=clip, noise_multiplier=2.0, delta=0.01, sampling="poisson", number=1)
        for clip in (1e-6, 1e-6, 2e-6)
    )
    before = made.server.weights.clone()
    for run in (made, again, other):
        run.run()
    layout = made.server.layout
    noise = torch.cat(
        [(made.server.weights - before)[place.start : place.stop] for place in layout.places]
    )
    # Half a percent of the norm is the clients'; 50 numbers have this deviation to within a third.
    assert float(noise.std()) == pytest.approx(2.0 * 1e-6 / 4, rel=0.33)
    assert torch.equal(made.server.weights, again.server.weights)
    assert not torch.equal(made.server.weights, other.server.weights)
    gaps = torch.ones(layout.length, dtype=torch.bool)
    for place in layout.places:
        gaps[place.start : place.stop] = False
    assert gaps.any()
    assert not made.server.weights[gaps].any()


def test_poisson_cohorts_differ_in_size_and_nobody_may_come():
    made = rounds(
        clip=1e-3, noise_multiplier=1.0, delta=0.01, sampling="poisson", per_round=1, number=30
    )
    history = made.run()
    sizes = [len(cohort) for cohort in history["cohort"]]
    assert min(sizes) == 0
    assert max(sizes) > 1
    assert sum(sizes) == pytest.approx(30, abs=15)  # three deviations
    assert not any(history["unchanged"])


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_epsilon_is_the_figure_of_the_library(sampling):
    dp = pytest.importorskip("dp_accounting")
    made = rounds(
        clip=0.1,
        noise_multiplier=1.1,
        delta=1e-3,
        sampling=sampling,
        clients=20,
        per_round=5,
        number=4,
    )
    found = made.run()["epsilon"]
    relation = dp.NeighboringRelation
    for count, epsilon in enumerate(found, 1):
        if sampling == "poisson":
            accountant = dp.rdp.RdpAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE)
            event = dp.PoissonSampledDpEvent(0.25, dp.GaussianDpEvent(1.1))
        else:
            accountant = dp.rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
            event = dp.SampledWithoutReplacementDpEvent(20, 5, dp.GaussianDpEvent(0.55))
        assert epsilon == pytest.approx(accountant.compose(event, count).get_epsilon(1e-3))
    assert found == sorted(set(found))


def test_all_clients_in_one_round_is_the_plain_gaussian_mechanism():
    pytest.importorskip("dp_accounting")
    made = rounds(clip=0.1, noise_multiplier=4.0, delta=1e-3, sampling="poisson", number=1)
    # Renyi divergence alpha / (2 z^2) and the conversion of Mironov 2017 (proposition 3), which the
    # library improves on.
    bound = min(a / 32 + math.log(1e3) / (a - 1) for a in (2 + 0.1 * k for k in range(500)))
    assert 0.5 * bound < made.run()["epsilon"][0] <= bound


@pytest.mark.parametrize(
    ("options", "algorithm", "words"),
    [
        ({}, FedAvg(), "'weighted': False"),
        ({}, Scaffold(), "one update"),
        ({}, Median(), "one update"),
        ({"noise_multiplier": 1.0, "clip": 1.0, "delta": 0.5}, None, "less than 1 / clients"),
    ],
)
def test_what_the_guarantee_does_not_cover_is_refused(options, algorithm, words):
    with pytest.raises(UserError, match=words):
        rounds(algorithm=algorithm, **options)


def test_options_out_of_bounds_are_refused():
    with pytest.raises(UserError, match="finite clip"):
        Privacy(math.inf, 1.0)
    with pytest.raises(
        UserError, match=r"sampling='uniform'; it must be one of 'fixed', 'poisson'"
    ):
        Privacy(1.0, 1.0, sampling="uniform")
    with pytest.raises(UserError, match="leave one of them out"):
        sim.rounds(
            FedAvg(weighted=False),
            stages={"privacy": Privacy(1.0, 0.0), "compression": Coded("1bit")},
        )
    with pytest.raises(
        UserError, match=r"there is no option 'noise'; it takes: clip, noise_multiplier"
    ):
        Federated(privacy={"clip": 1.0, "noise": 1.0})
    with pytest.raises(UserError, match="it needs 'noise_multiplier'"):
        Federated(privacy={"clip": 1.0})
