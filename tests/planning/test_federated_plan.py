"""Plans of federated training, beside what trainings count."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from allhands import SupervisedRunner, UserError
from allhands.cli.main import run
from allhands.federated import Federated
from allhands.planning.federated_plan import plan_federated
from allhands.planning.machines import bandwidth_of
from tests.federated import simulating as sim

COUNTED: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fp16": {"compress": "fp16"},
    "int8": {"compress": "int8"},
    "1bit": {"compress": "1bit"},
    "topk": {"compress": {"name": "topk", "keep": 0.1}},
    "scaffold": {"algorithm": "scaffold"},
    "own layers": {"local_layers": ["2.*"]},
    "own layers int8": {"local_layers": ["2.*"], "compress": "int8"},
    "late": {
        "systems": {
            "speed": {"name": "lognormal", "median": 10.0, "sigma": 1.0},
            "upload": 1e3,
            "deadline": 3.0,
            "dropout": 0.2,
        }
    },
    "over": {"systems": {"download": 1e3, "speed": 5.0, "delay": 0.1, "over_selection": 0.5}},
}


def parts(options: dict[str, Any]) -> dict[str, Any]:
    net = sim.model()
    return {
        "model": net,
        "criterion": nn.MSELoss(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.05),
        "datasets": {"batch_size": 4, "train": TensorDataset(*sim.data())},
        "strategy": Federated(
            clients=5, per_round=2, rounds=4, **{"executor": "serial"} | copy.deepcopy(options)
        ),
    }


@pytest.mark.parametrize("name", COUNTED)
def test_bytes_and_virtual_time_are_those_that_a_training_counts(name: str) -> None:
    found = plan_federated(**parts(COUNTED[name]))
    given = parts(COUNTED[name])
    history = SupervisedRunner(device="cpu").train(**given | {"distributed": given.pop("strategy")})
    assert [one.bytes_up for one in found.rounds] == history["bytes_up"]
    assert [one.bytes_down for one in found.rounds] == history["bytes_down"]
    if "systems" in COUNTED[name]:
        seconds = [one.seconds for one in found.rounds]
        assert seconds == pytest.approx(history["virtual_seconds"])
        assert [one.arrived for one in found.rounds] == list(map(len, history["arrived"]))
    else:
        assert found.seconds is None
        assert "no time: say what links and devices do" in str(found)


def test_links_and_devices_give_the_time_of_a_round() -> None:
    given = parts({})
    given["strategy"] = Federated(clients=5, per_round=5, rounds=2)
    found = plan_federated(**given, download=1e4, upload=1e3, flops=1e4)
    # Forward, and backward to the weights and, above the first layer, to the input.
    assert found.flops == 2 * (2 * 5 * 7 + 3 * 7)
    most = 11  # of 55 samples, dealt out evenly
    expected = found.down / 1e4 + found.up / 1e3 + most * found.flops / 1e4
    assert [one.seconds for one in found.rounds] == pytest.approx([expected] * 2)
    assert f"all {2 * expected:,.4g} s" in str(found)
    slow = plan_federated(**parts(COUNTED["over"]), download=10.0)
    assert slow.rounds[0].seconds > plan_federated(**parts(COUNTED["over"])).rounds[0].seconds


def test_memory_of_server_and_clients() -> None:
    plain = plan_federated(**parts({}))
    weights = sum(p.nbytes for p in sim.model().parameters())
    assert plain.server["model"] >= weights
    assert plain.server["sums"] >= plain.server["model"]  # in float64
    assert "keeps" not in plain.client
    kept = plan_federated(**parts(COUNTED["scaffold"]))
    assert kept.client["keeps"] >= weights
    assert kept.server["algorithm"] >= weights


def test_nothing_is_trained_and_a_meta_model_is_enough() -> None:
    given = parts(COUNTED["late"])
    before = [p.clone() for p in given["model"].parameters()]
    strategy = given["strategy"]
    first = plan_federated(**given)
    assert all(torch.equal(*two) for two in zip(before, given["model"].parameters(), strict=True))
    assert plan_federated(**given) == first  # the strategy's clock was left alone
    assert strategy.systems.now == 0.0
    meta = given["model"].to("meta")
    optimizer = torch.optim.SGD(meta.parameters(), lr=0.05)
    assert plan_federated(**given | {"model": meta, "optimizer": optimizer}).up == first.up


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(UserError, match="fedbuff"):
        plan_federated(**parts({"algorithm": "fedbuff"}))
    assert bandwidth_of("50Mbit/s") == 50e6 / 8
    assert bandwidth_of("1.5 GB/s") == 1.5e9
    for text in ("50", "0Mbit/s", "fast", "1.2.3Mbit/s"):
        with pytest.raises(UserError, match="50Mbit/s or 12.5GB/s"):
            bandwidth_of(text)


def test_the_command_plans_a_federated_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init", "federated", str(tmp_path)]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    links = ["--download", "50Mbit/s", "--upload", "10Mbit/s", "--client-flops", "5e9"]
    assert run(["plan", "-C", "run.yml", *links, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["clients"] == 10
    assert len(found["rounds"]) == 10
    assert found["seconds"] > 0
    assert run(["plan", "-C", "run.yml", "--gpus", "2"]) == 2
    assert "--gpus is for workers of one training" in capsys.readouterr().err
    assert run(["plan", "--upload", "1Mbit/s"]) == 2
    assert "--upload is of the clients of a federated run" in capsys.readouterr().err
