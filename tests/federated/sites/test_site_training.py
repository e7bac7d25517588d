"""Training across sites in memory: the simulation's weights to the bit."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.utils.data import TensorDataset

pytest.importorskip("flwr")

from allhands.errors import UserError
from allhands.federated.sites.site_training import Across
from tests.federated.sites.across import data, grid, same, serve, simulate
from tests.federated.sites.fake_grid import FakeGrid

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithm": "scaffold"},
        {"algorithm": "fednova"},
        {"algorithm": "qfedavg"},
        {"algorithm": "fedprox"},
        {"algorithm": "fedadam"},
        {"algorithm": "median"},
        {"per_round": 2},
        {"local_layers": ["3"]},
        {"compress": {"name": "topk", "keep": 0.2, "feedback": True}},
        {"compress": "int8"},
        {
            "algorithm": {"name": "fedavg", "weighted": False},
            "privacy": {"clip": 0.5, "noise_multiplier": 0.0},
        },
    ],
    ids=str,
)
def test_weights_are_those_of_the_simulation(tmp_path, options):
    norm = not options or "per_round" in options  # what BatchNorm counts travels too
    there, history = serve(grid(tmp_path, norm, **options), norm, **options)
    here, expected = simulate(norm, **options)
    assert same(there, here)
    assert history["train"]["loss"] == expected["train"]["loss"]
    assert history["cohort"] == expected["cohort"]
    for kind in ("failed", "skipped", "absent"):
        assert not any(history[kind])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: (torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "epoch"),
        lambda optimizer: (
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4),
            "epoch",
        ),
    ],
    ids=["rates", "momentum too"],
)
def test_a_schedule_reaches_the_sites(tmp_path, schedule):
    there, history = serve(grid(tmp_path, scheduler=schedule), scheduler=schedule)
    here, expected = simulate(scheduler=schedule)
    assert history["lr"] == expected["lr"]
    assert same(there, here)


def test_sites_measure_on_their_own_tests_and_the_mean_is_the_simulations(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLHANDS_CURVES", "1")  # and the page
    options = {"test_fraction": 0.3, "local_layers": ["3"]}
    there, history = serve(grid(tmp_path, **options), logdir=tmp_path / "log", **options)
    here, expected = simulate(**options)
    assert same(there, here)
    assert history["clients"]["round"] == expected["clients"]["round"] == [0, 1, 2]
    for name in ("loss", "accuracy"):
        assert history["clients"][name] == pytest.approx(expected["clients"][name], rel=1e-12)
    assert "clients_accuracy" in (tmp_path / "log" / "metrics.csv").read_text().splitlines()[0]
    assert (tmp_path / "log" / "report.html").stat().st_size > 1000


def test_a_server_with_data_measures_the_global_model_itself(tmp_path):
    given = grid(tmp_path)
    datasets = {"batch_size": 4, "train": TensorDataset(*data()), "valid": TensorDataset(*data())}
    _, history = serve(Across(given, data=True), datasets=datasets)
    assert len(history["valid"]["loss"]) == 3
    assert history["valid"]["loss"][-1] < history["valid"]["loss"][0]
    assert "clients" not in history
    kinds = {dict(request["allhands"])["kind"] for request in given.nodes[100].asked}
    assert kinds == {"hello", "train"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "local_only"}, "shares nothing"),
        ({"algorithm": "centralised"}, "stay at their sites"),
        ({"algorithm": "fedbuff", "systems": {"speed": 1.0}}, "virtual time"),
        ({"systems": {"speed": 1.0}}, "systems= are devices in virtual time"),
        ({"executor": "stacked"}, "executor='stacked'"),
        ({"devices_per_client": 2}, "devices_per_client=2"),
        ({"clients": 4, "sites": {"names": ["a", "b"]}}, "2 sites and the run has 4 clients"),
        ({"sites": {"names": None}}, "who are the sites"),
        ({"sites": {"min": 5}}, "min=5 of 4 sites"),
    ],
    ids=str,
)
def test_what_cannot_be_had_across_sites_is_refused_by_name(options, message):
    with pytest.raises(UserError, match=message):
        serve(FakeGrid(), **options)


def test_a_site_without_a_key_is_refused_before_anything_starts():
    with pytest.raises(
        UserError, match="sites.names has 'south', 'west', of which the list of sites"
    ):
        serve(Across(FakeGrid(), {"north": b"1", "east": b"2"}))


def test_a_simulation_checks_how_many_sites_there_are():
    with pytest.raises(UserError, match="2 sites and the run has 4 clients; write clients=2"):
        simulate(sites={"names": ["a", "b"]})


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_noise_and_cohorts_do_not_follow_from_the_seed_that_sites_know(tmp_path, sampling):
    pytest.importorskip("dp_accounting")
    privacy = {"clip": 0.5, "noise_multiplier": 0.3, "sampling": sampling}
    options = {
        "algorithm": {"name": "fedavg", "weighted": False},
        "privacy": privacy,
        "rounds": 6,
        "per_round": 2,
    }
    cohorts, models = [], []
    for number in range(2):
        given = grid(tmp_path / str(number), **options)
        model, history = serve(given, logdir=tmp_path / f"log{number}", **options)
        cohorts.append(history["cohort"])
        models.append(model)
        assert len(history["epsilon"]) == 6
    assert cohorts[0] != cohorts[1]
    assert not same(*models)
    # The checkpoint has the secret: what is done again is the same.
    given = grid(tmp_path / "0", **options)
    shutil.rmtree(tmp_path / "log0" / "checkpoints" / "epoch-0006")
    model, history = serve(given, logdir=tmp_path / "log0", resume="auto", **options)
    assert history["cohort"] == cohorts[0]
    assert same(model, models[0])
