"""Several processes: the same model on any number of workers, failures of one rank that all end
with, going on after a loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import allhands
from allhands import SupervisedRunner, WorkerError
from allhands.federated import Federated
from allhands.federated.algorithms import Scaffold
from allhands.federated.executors.shared import Shared
from allhands.federated.failures import ClientFailedError
from allhands.federated.team import Team
from allhands.launch import spawn
from allhands.loop import workers
from tests.federated import simulating as sim
from tests.patience import patience

pytestmark = [
    pytest.mark.serial,
    pytest.mark.usefixtures("preloaded"),
    pytest.mark.usefixtures("forked_python"),
]


@pytest.fixture
def in_this_process(monkeypatch):
    yield lambda: monkeypatch.setattr(workers, "world_around", lambda: 1)
    allhands.finalize()


class Killing(Scaffold):
    """Ends the process of rank 1 in the middle of a round, once."""

    def __init__(self, mark: Path, round_: int) -> None:
        super().__init__()
        self.mark, self.round = mark, round_

    def contribute(self, trained, server, sums):
        super().contribute(trained, server, sums)
        if server.round == self.round and server.world.rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    count: int | None, algorithm: Any = "scaffold", **given: Any
) -> tuple[dict[str, Any], torch.Tensor]:
    net = sim.model()
    samples = TensorDataset(*sim.data())
    strategy = Federated(
        clients=9, per_round=5, rounds=5, local_epochs=2, algorithm=algorithm, executor="serial"
    )
    history = SupervisedRunner(device="cpu").train(
        model=net,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        distributed=strategy,
        datasets={"batch_size": 4, "train": samples, "valid": samples},
        workers=count,
        **given,
    )
    return history, torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def test_three_workers_train_the_model_of_one(in_this_process):
    history, weights = train(3)
    in_this_process()
    expected, whole = train(None)
    assert torch.equal(weights, whole)
    for name in ("round", "cohort", "train", "lr", "failed", "skipped"):
        assert history[name] == expected[name]
    assert history["valid"]["loss"] == pytest.approx(expected["valid"]["loss"], rel=1e-12)


def test_a_worker_that_is_killed_in_a_round_is_named_and_the_run_goes_on_from_the_round_before(
    tmp_path, in_this_process
):
    began = time.monotonic()
    with pytest.raises(WorkerError, match="worker 1 .*SIGKILL|rank 1.*SIGKILL") as caught:
        train(2, Killing(tmp_path / "mark", 3), logdir=tmp_path)
    assert caught.value.exit_code != 0
    assert time.monotonic() - began < patience(30)
    # What was in flight may be the checkpoint of the round before the last whole one.
    history, weights = train(3, Killing(tmp_path / "mark", 3), logdir=tmp_path, resume="auto")
    in_this_process()
    expected, whole = train(None, Killing(tmp_path / "mark", 99))
    assert torch.equal(weights, whole)
    assert history["train"] == expected["train"]


class Sleeping:
    """A data set that takes its time with each sample, and of which some cannot be read."""

    def __init__(self, seconds: float, bad: int | None = None) -> None:
        self.x, self.y = sim.data(48)
        self.seconds, self.bad = seconds, bad

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.bad:
            raise OSError("a bad disk")
        rank = int(os.environ.get("RANK", "0"))
        time.sleep(self.seconds * (4 if rank == 1 else 1))
        return self.x[index], self.y[index]


def uneven(seconds: float, bad: int | None = None, **stages: Any) -> Any:
    return sim.rounds(
        given=Sleeping(seconds, bad),
        who=sim.clients((2, 4) * 8),
        number=3,
        batch_size=2,
        stages=stages,
    )


def on_a_rank() -> dict[str, Any]:
    """What one of two ranks sees; rank 1 is four times as slow."""
    world = allhands.init(device="cpu")
    found: dict[str, Any] = {}
    try:
        made = uneven(0.003)
        pulls, trained = [], []
        pull, train_part = made.queue.pull, made.train
        made.queue.pull = lambda: (part := pull(), pulls.append(part is not None))[0]
        made.train = lambda jobs, sums: (trained.append(len(jobs)), train_part(jobs, sums))[1]
        history = made.run()
        found |= {
            "weights": made.server.weights.tolist(),
            "loss": history["train"]["loss"],
            "pulls": sum(pulls),
            "trained": sum(trained),
        }
        skipping = uneven(0.0, 0, on_client_failure="skip")
        found["failed"] = skipping.run()["failed"]
        stopping = uneven(0.0, 0)
        began = time.monotonic()
        try:
            stopping.run()
        except ClientFailedError as error:
            found["error"] = str(error)
        found["seconds"] = time.monotonic() - began
    finally:
        if world.world_size > 1:
            torch.distributed.barrier()
        allhands.finalize()
    return found


def test_late_devices_pull_and_a_failure_on_one_rank_ends_all_with_the_same_words():
    first, second = spawn(on_a_rank, workers=2)
    for found in (first, second):
        assert found["failed"] == [[0]] * 3
        assert "client 0 failed" in found["error"]
        assert "a bad disk" in found["error"]
        assert found["seconds"] < 10
    assert first["error"] == second["error"]
    assert first["trained"] + second["trained"] == 3 * 16
    assert first["pulls"] > second["pulls"]
    alone = on_a_rank()
    assert alone["trained"] == 3 * 16
    for found in (first, second):
        assert found["weights"] == alone["weights"]
        assert found["loss"] == alone["loss"]


def as_teams() -> dict[str, Any]:
    """What each of four ranks in teams of two ends with, and what becomes of a client that fails on
    one rank of its team."""
    world = allhands.init(device="cpu")
    found: dict[str, Any] = {}
    try:
        for name in ("scaffold", "fedavg"):
            net = sim.model()
            samples = TensorDataset(*sim.data())
            strategy = Federated(
                clients=9,
                per_round=5,
                rounds=3,
                local_epochs=2,
                algorithm=name,
                devices_per_client=2,
            )
            history = SupervisedRunner(device="cpu").train(
                model=net,
                criterion=nn.MSELoss(),
                optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
                datasets={"batch_size": 4, "train": samples},
                clip_norm=1.0,
                distributed=strategy if world.world_size > 1 else Federated(**SAME, algorithm=name),
                workers=None,
            )
            found[name] = (
                torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist(),
                history["train"]["loss"],
            )
        if world.world_size > 1:
            found["errors"] = failing_in_a_team(world)
    finally:
        if world.world_size > 1:
            torch.distributed.barrier()
        allhands.finalize()
    return found


SAME = {"clients": 9, "per_round": 5, "rounds": 3, "local_epochs": 2, "executor": "serial"}


def failing_in_a_team(world: Any) -> list[Any]:
    team = Team.of(world, 2)
    found: list[Any] = []
    bad = sim.data()[1][40]  # of client 2

    def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if made.server.round == 1 and bool((target == bad).any()):  # on one rank of the team
            raise OSError("a bad disk")
        return nn.functional.mse_loss(output, target)

    for action in ("skip", "stop"):
        made = sim.rounds(
            batch_size=4, criterion=criterion, stages={"on_client_failure": action, "team": team}
        )
        made.executor = Shared(made.work, made.server, team)
        try:
            history = made.run()
            found.append(history["failed"])
        except ClientFailedError as error:
            found.append(str(error))
    return found


def test_teams_train_clients_as_one_device_does(in_this_process):
    ranks = spawn(as_teams, workers=4)
    in_this_process()
    alone = as_teams()
    for found in ranks:
        for name in ("scaffold", "fedavg"):
            assert found[name][0] == pytest.approx(alone[name][0], rel=1e-9, abs=1e-12)
            assert found[name][1] == pytest.approx(alone[name][1], rel=1e-9)
        skipped, stopped = found["errors"]
        assert skipped == [[], [2], []]
        assert "round 1: client 2 failed" in stopped
        assert "a bad disk" in stopped
        assert found["errors"] == ranks[0]["errors"]


SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from allhands import SupervisedRunner
from allhands.federated import Federated
x = torch.linspace(-1, 1, 64)[:, None]
data = TensorDataset(x, x ** 2)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
history = SupervisedRunner(device="cpu").train(
    model=net, criterion=nn.MSELoss(), optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
    datasets={"batch_size": 4, "train": data},
    distributed=Federated(clients=8, per_round=4, rounds=3))
print("weights", sum(p.double().sum().item() for p in net.parameters()), flush=True)
"""


def test_a_script_joins_the_world_that_launch_makes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from allhands.cli.main import main; main()",
            "launch",
            "-n",
            "2",
            str(script),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers on cpu; 4 of 8 clients a round" in done.stdout
    weights = [line.split("weights ")[1] for line in done.stdout.splitlines() if "weights " in line]
    assert len(weights) == 2
    assert len(set(weights)) == 1
