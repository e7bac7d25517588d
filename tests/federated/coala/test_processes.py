"""The same numbers from any number of processes, with clients and servers of the user's own too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import allhands
import allhands.federated as coala
from allhands.federated.coala import api
from tests.federated.coala import test_api as alone
from tests.federated.coala.test_server import Median
from tests.worlds import in_world

pytestmark = pytest.mark.serial


class Remembers(coala.BaseClient):
    """Trains more in each of its rounds, so that an attribute which got lost would show."""

    seen = 0

    def train(self, conf, device):
        self.seen += 1
        for _ in range(self.seen):
            super().train(conf, device)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.01 * torch.rand_like(parameter))

    def test(self, conf, device):
        super().test(conf, device)
        return {"accuracy": self.test_accuracy, "seen": float(self.seen)}


class Drifts(torch.nn.Module):
    """Each process would begin with other weights."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
        with torch.no_grad():
            self.layer.weight.fill_(0.1 + offset)
            self.layer.bias.fill_(offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def trained(processes: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    world = allhands.current_world()
    assert world is not None
    for serving, training, model, strategy in (
        (None, None, Drifts(world.rank), "greedy"),
        (None, None, alone.Net, "slowest"),
        (None, None, alone.Net, "random"),
        (None, Remembers, alone.Net, "greedy"),
        (Median, Remembers, alone.Net, "greedy"),
    ):
        result = alone.train(
            serving,
            training,
            model=model,
            gpu=processes if processes > 1 else 0,
            server={
                "clients_per_round": 2,
                "rounds": 4,
                "test_every": 2,
                "test_all": True,
                "save_model_every": 100,
            },
            resource_heterogeneous={"grouping_strategy": strategy},
        )
        history = {name: result.history[name] for name in ("cohort", "train", "test")}
        found.append({"weights": alone.flat(result.model).tolist(), "history": history})
    api.unregister()
    return found


def test_three_processes_give_what_one_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    allhands.init(device="cpu")
    expected = trained(1)
    allhands.finalize()
    api._joined = None
    assert expected[1]["weights"] == expected[2]["weights"]
    assert expected[3]["weights"] != expected[4]["weights"]
    for found in in_world(3, trained, 3):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-6)
            assert ours["history"]["cohort"] == theirs["history"]["cohort"]
            assert ours["history"]["train"]["loss"] == pytest.approx(
                theirs["history"]["train"]["loss"], rel=1e-6
            )
            for name, values in theirs["history"]["test"].items():
                assert ours["history"]["test"][name] == pytest.approx(values, rel=1e-6), name


COHORTS = ((1, "dir"), (3, "class"), (5, "dir"))


def cohorts(processes: int) -> list[list[float]]:
    """The weights after trainings with fewer clients than 3 processes, as many, and more."""
    drawn = torch.Generator().manual_seed(2)
    x = torch.randn(240, 6, generator=drawn)
    samples = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    found = []
    for clients, split in COHORTS:
        api.unregister()
        coala.register_model(alone.Net)
        coala.register_dataset(samples, samples)
        coala.init(
            {
                "gpu": processes if processes > 1 else 0,
                "data": {"split_type": split, "num_of_clients": 6, "min_size": 5},
                "server": {"rounds": 2, "clients_per_round": clients},
                "client": {"local_epoch": 1},
            }
        )
        result = coala.run()
        assert [len(cohort) for cohort in result.history["cohort"]] == [clients, clients]
        found.append(alone.flat(result.model).tolist())
    api.unregister()
    return found


def test_fewer_clients_than_processes_as_many_and_more(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    allhands.init(device="cpu")
    expected = cohorts(1)
    allhands.finalize()
    api._joined = None
    for found in in_world(3, cohorts, 3):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
