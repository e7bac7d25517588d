"""A run across sites as a simulation in one place: the weights and numbers of the sites."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest
import torch

import allhands
from allhands.cli import main
from allhands.cli.run_training import definition, train
from allhands.config import read_run
from allhands.errors import UserError

pytest.importorskip("flwr")
from allhands.federated.sites.simulation import data_of_sites
from allhands.federated.sites.site_training import Across, SiteRunner, across_sites
from allhands.federated.sites.site_worker import SiteWorker
from tests.federated.sites import three_sites
from tests.federated.sites.fake_grid import FakeGrid

pytestmark = pytest.mark.usefixtures("quick")
SIMULATE = ["federated", "simulate", "-C", "run.yml", "--data", "data"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def at_sites(*changes: str):
    """The history of the same run across sites in memory."""
    grid = FakeGrid()
    for number, name in enumerate(three_sites.NAMES):
        run_file = read_run([Path("run.yml")], [*changes, f"data.root=data/{name}"])
        grid.add(100 + number, SiteWorker(definition(run_file), name, Path("kept", name)).handle)
    run_file = read_run([Path("run.yml")], changes)
    return train(run_file, partial(across_sites, across=Across(grid)), SiteRunner)


@pytest.mark.parametrize("changes", [[], ["strategy.test_fraction=0.3"]], ids=["valid", "split"])
def test_weights_and_numbers_are_those_of_the_sites(changes, capsys):
    three_sites.write(Path())
    assert main.run([*SIMULATE, *changes]) == 0
    assert "written to logs/simulated: metrics.csv, report.html" in capsys.readouterr().out
    allhands.finalize()
    there = at_sites(*changes)
    one, other = (
        allhands.load_checkpoint(Path(folder, "checkpoints", "last"))
        for folder in ("logs/simulated", "logs")
    )
    assert all(torch.equal(other["model"][name], one["model"][name]) for name in one["model"])
    assert there["clients"]["round"] == [0, 1]
    for row, same in zip(rows("logs/simulated"), rows("logs"), strict=True):
        assert row["train_loss"] == same["train_loss"]
        for name in ("clients_loss", "clients_accuracy"):
            assert float(row[name]) == pytest.approx(float(same[name]), rel=1e-9)


def rows(folder: str) -> list[dict[str, str]]:
    with Path(folder, "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["strategy.sites.names=[north, west]"], "--data data has no folder west"),
        (["strategy.sites=null"], "who are the sites"),
        (["strategy=ddp"], "write strategy: {name: federated"),
        (["strategy.executor=stacked"], "executor='stacked'"),
        (["strategy.clients=4"], "3 sites and the run has 4 clients"),
        (["data.name=own.py:lod"], "lod"),
    ],
    ids=str,
)
def test_mistakes_are_named_before_anything_is_trained(changes, message, capsys):
    three_sites.write(Path())
    assert main.run([*SIMULATE, *changes]) == 2
    assert message in capsys.readouterr().err
    assert not Path("logs").exists()


def test_a_site_with_other_samples_is_named(capsys):
    three_sites.write(Path(), columns={"south": 5})
    assert main.run(SIMULATE) == 2
    error = capsys.readouterr().err
    assert "a sample of the site 'south' is [5] float32, [] int64, and one of 'north' [6]" in error


def test_a_site_whose_data_cannot_be_had_is_named():
    def fails() -> dict[str, object]:
        raise UserError("no file")

    good = {"train": [(torch.zeros(2), 1)]}
    with pytest.raises(UserError, match="the data of the site 'b': no file"):
        data_of_sites({"a": good, "b": {"get_datasets_fn": fails}}, 1, True)
    with pytest.raises(UserError, match="the data of the site 'b': federated training deals out"):
        data_of_sites({"a": good, "b": {"valid": good["train"]}}, 1, True)
    with pytest.raises(UserError, match="'b' have no sample to train on"):
        data_of_sites({"a": good, "b": {"train": []}}, 1, True)
    apart = {**good, "valid": {"dataset": good["train"], "collate_fn": list}}
    with pytest.raises(UserError, match="have a collate_fn each"):
        data_of_sites({"a": apart}, 1, True)
    assert len(data_of_sites({"a": apart, "b": good}, 1, False)["train"]["dataset"]) == 2
