"""The ServerApp: what it reads, and that it trains a run file with whoever is connected."""

from __future__ import annotations

import json
import os
import signal

import pytest
import yaml

pytest.importorskip("flwr")
from allhands.cli.run_training import definition
from allhands.config import read_run
from allhands.errors import UserError
from allhands.federated.sites import server_app
from allhands.federated.sites.site_worker import SiteWorker
from tests.federated.sites.fake_grid import FakeGrid

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def run(tmp_path):
    """A run file, and two sites that are connected; as the server's state folder says it."""
    config = {
        "data": {"name": "digits", "batch_size": 16, "limit": 64},
        "model": {"name": "mlp"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "device": "cpu",
        "logdir": str(tmp_path / "log"),
        "resume": "auto",
        "strategy": {"name": "federated", "rounds": 3, "sites": {"names": ["a", "b"], "wait": 1}},
    }
    (tmp_path / "run.yml").write_text(yaml.safe_dump(config))
    settings = {
        "config": [str(tmp_path / "run.yml")],
        "overrides": ["seed=7"],
        "data": None,
        "allow": None,
        "tokens": None,
        "insecure": True,
    }
    (tmp_path / "server.json").write_text(json.dumps(settings))
    grid = FakeGrid()
    for number, name in enumerate("ab"):
        there = definition(read_run([tmp_path / "run.yml"], ["seed=7"]))
        grid.add(number, SiteWorker(there, name, tmp_path / name).handle)
    return grid


def kinds(grid):
    return [request["allhands"]["kind"] for request in grid.nodes[0].asked]


def test_a_run_file_is_trained_with_the_sites(tmp_path, run, monkeypatch):
    monkeypatch.setenv("ALLHANDS_SITES_STATE", str(tmp_path))
    monkeypatch.setenv("ALLHANDS_CURVES", "1")  # and the page
    server_app.app(grid=run, context=None)
    assert kinds(run) == ["hello", "train", "evaluate", "train", "evaluate", "train", "evaluate"]
    assert {request["allhands"]["seed"] for request in run.nodes[0].asked[1:]} == {7}
    for name in (
        "metrics.csv",
        "run.yml",
        "events.jsonl",
        "report.html",
        "checkpoints",
        "tensorboard",
    ):
        assert (tmp_path / "log" / name).exists()
    lines = (tmp_path / "log" / "metrics.csv").read_text().splitlines()
    assert len(lines) == 4
    assert "clients_accuracy" in lines[0]
    assert (
        json.loads((tmp_path / "log" / "events.jsonl").read_text().splitlines()[-1])["reason"]
        == "finished"
    )


def test_sigterm_abandons_the_round_and_the_next_start_goes_on(tmp_path, run, monkeypatch):
    monkeypatch.setenv("ALLHANDS_SITES_STATE", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    run.before_pull = lambda: (
        os.kill(os.getpid(), signal.SIGTERM) if kinds(run).count("train") == 2 else None
    )
    with pytest.raises(SystemExit) as ended:
        server_app.app(grid=run, context=None)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert (
        json.loads((tmp_path / "log" / "events.jsonl").read_text().splitlines()[-1])["kind"]
        == "end"
    )
    run.before_pull = lambda: None
    server_app.app(grid=run, context=None)
    trained = [
        request["allhands"]["round"]
        for request in run.nodes[0].asked
        if request["allhands"]["kind"] == "train"
    ]
    assert trained == [0, 1, 1, 2]
    assert (
        len(
            {
                request["allhands"]["run"]
                for request in run.nodes[0].asked
                if request["allhands"]["kind"] == "train"
            }
        )
        == 1
    )


def test_what_the_superlink_says_is_told_as_it_is(tmp_path, run, monkeypatch):
    monkeypatch.setenv("ALLHANDS_SITES_STATE", str(tmp_path))

    def broken():
        if "train" in kinds(run):
            raise ConnectionError("the SuperLink is gone")

    run.before_pull = broken
    with pytest.raises(ConnectionError, match="^the SuperLink is gone$"):
        server_app.app(grid=run, context=None)


def test_a_generated_app_knows_its_run_file(monkeypatch):
    assert server_app.settings_of({"ALLHANDS_SITES_RUN": "/app/run.yml"}) == {
        "config": ["/app/run.yml"],
        "overrides": [],
    }
    with pytest.raises(UserError, match="is started by `allhands federated server`"):
        server_app.settings_of({})


def test_another_strategy_is_refused(tmp_path):
    (tmp_path / "run.yml").write_text("strategy: {name: ddp}\n")
    with pytest.raises(
        UserError,
        match="run.yml, line 1: strategy.name = .ddp.: sites train together by strategy.name: "
        "federated",
    ):
        server_app.serve(FakeGrid(), {"config": [tmp_path / "run.yml"], "overrides": []})


def test_data_of_the_server_are_read_where_they_are(tmp_path):
    (tmp_path / "run.yml").write_text(
        "data: {name: mnist}\nstrategy: {name: federated, sites: {names: [a], wait: 0}}\n"
    )
    with pytest.raises(UserError, match="nowhere"):
        server_app.serve(
            FakeGrid(),
            {"config": [tmp_path / "run.yml"], "overrides": [], "data": str(tmp_path / "nowhere")},
        )
    with pytest.raises(UserError, match="missing: a"):  # without, nothing is read
        server_app.serve(FakeGrid(), {"config": [tmp_path / "run.yml"], "overrides": []})
