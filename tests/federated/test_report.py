"""The report of a run."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from allhands import SupervisedRunner
from allhands.errors import UserError
from allhands.federated import Federated
from allhands.federated.report import _axes, report
from allhands.loop import workers
from allhands.report import History
from tests.federated import simulating as sim

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def _nobody_around(world, monkeypatch):
    monkeypatch.setattr(workers, "world_around", lambda: 1)


HISTORY = {
    "round": [0, 1, 2],
    "seconds": [1.0, 1.0, 1.5],
    "train": {"loss": [3.0, 2.0, 1.0]},
    "bytes_up": [1e6, 2e6, 3e6],
    "bytes_down": [1e6, 1e6, 1e6],
    "failed": [[], [4], []],
    "virtual_time": [5.0, 6.0, 9.0],
    "valid": {"round": [1, 2], "accuracy": [0.25, 0.5]},
}


def test_values_stand_where_they_were_measured():
    assert History(HISTORY).measured() == {
        "train loss": ([0, 1, 2], [3.0, 2.0, 1.0]),
        "valid accuracy": ([1, 2], [0.25, 0.5]),
    }
    assert _axes(HISTORY) == {
        "round": [1, 2, 3],
        "megabytes up and down": [2.0, 5.0, 9.0],
        "virtual seconds": [5.0, 6.0, 9.0],
    }


def test_a_report_is_one_file_with_all_pictures(tmp_path):
    last = {"client": [3, 4], "rank": [0, 1], "seconds": [0.25, 0.5]}
    report(
        HISTORY,
        tmp_path / "a.html",
        last=last,
        sizes=[1, 2, 3, 4, 5],
        settings={"algorithm": "<fedavg>"},
        names=["a", "b", "c", "north", "south"],
    )
    text = (tmp_path / "a.html").read_text()
    assert re.findall(r'aria-label="([^"]+)"', text) == [
        *(f"{kind} over {label}" for kind in ("loss", "accuracy") for label in _axes(HISTORY)),
        "samples of a client: each of them",
        "seconds of a client, last round: each of them",
        "which rank trained which client, for how long",
    ]
    assert "src=" not in text
    assert "http" not in text
    assert "&lt;fedavg&gt;" in text
    assert ">north<" in text
    assert "<td>clients failed</td><td>1</td>" in text
    assert "0.5 (0.25 to 0.5)" in text


def test_a_history_without_rounds_is_refused(tmp_path):
    with pytest.raises(UserError, match="train at least one"):
        report({"round": []}, tmp_path / "a.html")


def test_the_last_round_tells_who_was_trained_where(tmp_path):
    rounds = sim.rounds(per_round=3, number=2)
    rounds.run()
    assert rounds.last["client"] == rounds.history["cohort"][-1]
    assert rounds.last["rank"] == [0, 0, 0]
    assert all(seconds > 0 for seconds in rounds.last["seconds"])
    assert rounds.last["samples"] == [sim.SIZES[client] for client in rounds.last["client"]]
    report(rounds.history, tmp_path / "a.html", last=rounds.last, sizes=rounds.clients.sizes)


@pytest.mark.parametrize("drawn", [True, False])
def test_a_training_leaves_its_report_in_the_logdir(tmp_path, monkeypatch, drawn):
    monkeypatch.setenv("ALLHANDS_CURVES", "1")
    if not drawn:
        for name in ("allhands.federated.report", "allhands.loop.loggers"):
            monkeypatch.setattr(f"{name}.has_matplotlib", lambda: False)
    net = sim.model()
    SupervisedRunner(device="cpu").train(
        model=net,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        logdir=tmp_path,
        datasets={"batch_size": 8, "train": TensorDataset(*sim.data())},
        distributed=Federated(clients=5, per_round=3, rounds=2, executor="serial"),
    )
    text = (tmp_path / "report.html").read_text()
    assert "<td>algorithm</td><td>fedavg</td>" in text
    assert 'aria-label="loss over round"' in text  # which takes no matplotlib
    assert ("which rank trained which client" in text) == drawn
    assert ("pip install" in text) != drawn
    for title in ("Where the time went", "Memory", "Membership", "Environment"):
        assert f"<h2>{title}</h2>" in text


def test_a_large_cohort_has_a_bar_for_each_rank(tmp_path):
    last = {
        "client": list(range(5000)),
        "rank": [n % 4 for n in range(5000)],
        "seconds": [0.5] * 5000,
    }
    report(HISTORY, tmp_path / "a.html", last=last, sizes=[3] * 5000)
    assert (tmp_path / "a.html").stat().st_size < 400_000
