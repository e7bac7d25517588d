"""Training with workers that the runner starts itself: what comes back, from where it works, and
how it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Callback, EarlyStopping, SupervisedRunner, UserError, WorkerError
from tests.patience import patience
from tests.runner.problems import arguments, classification, classifier

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


def train(**changes: Any) -> Any:
    given = arguments(distributed=True, workers=2, **changes)
    history = SupervisedRunner(device="cpu").train(**given)
    return given, history


def test_the_callers_objects_hold_what_was_trained(tmp_path: Path) -> None:
    stop = EarlyStopping(50)
    given = arguments(distributed=True, workers=2, num_epochs=4, logdir=tmp_path, callbacks=[stop])
    given["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(given["optimizer"], [2])
    before = given["model"][0].weight.clone()
    history = SupervisedRunner(device="cpu").train(**given)
    assert not torch.equal(before, given["model"][0].weight)
    values = SupervisedRunner(device="cpu").evaluate(
        model=given["model"],
        criterion=nn.CrossEntropyLoss(),
        loaders={"valid": given["loaders"]["valid"]},
        metrics=["accuracy"],
    )
    assert values["valid"]["loss"] == pytest.approx(history["valid"]["loss"][-1], rel=1e-6)
    assert values["valid"]["accuracy"] == history["valid"]["accuracy"][-1]
    assert (
        int(next(iter(given["optimizer"].state.values()))["step"]) == history["step"][-1] == 4 * 4
    )
    assert given["scheduler"].last_epoch == 4
    assert given["optimizer"].param_groups[0]["lr"] == pytest.approx(0.002)
    assert stop.best == min(history["valid"]["loss"])


def test_it_can_be_trained_on_afterwards() -> None:
    given, _ = train(num_epochs=1)
    first = given["model"][0].weight.clone()
    SupervisedRunner(device="cpu").train(**{**given, "distributed": False, "workers": None})
    assert not torch.equal(first, given["model"][0].weight)


def test_resumed_equals_uninterrupted_on_the_same_world(tmp_path: Path) -> None:
    whole, expected = train(num_epochs=3, dropout=0.3, logdir=tmp_path / "whole")
    train(num_epochs=1, dropout=0.3, logdir=tmp_path / "cut")
    resumed, history = train(num_epochs=3, dropout=0.3, logdir=tmp_path / "cut", resume="auto")
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole["model"].parameters(), resumed["model"].parameters(), strict=True)
    )
    assert history["valid"] == expected["valid"]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.rare), 3])
def test_predict_gives_one_row_a_sample_in_order(workers: int) -> None:
    torch.manual_seed(0)
    model = classifier()
    for samples in (1, 2, 7, 53):
        data = classification(samples)
        rows = SupervisedRunner(device="cpu").predict(
            model=model,
            loader=DataLoader(data, 4, shuffle=True),
            distributed=workers > 1,
            workers=workers if workers > 1 else None,
        )
        assert rows.shape == (samples, 4)
        assert torch.allclose(rows, model(data.tensors[0]), atol=1e-6)


class Several(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"twice": x * 2, "pair": (x, [x.sum(1)])}


def test_predict_keeps_the_structure_of_the_output() -> None:
    data = classification(9)
    rows = SupervisedRunner(device="cpu").predict(
        model=Several(), dataset=data, batch_size=2, distributed=True, workers=2
    )
    x = data.tensors[0]
    assert torch.equal(rows["twice"], x * 2)
    assert isinstance(rows["pair"], tuple)
    assert torch.allclose(rows["pair"][1][0], x.sum(1))


def test_predict_refuses_to_lose_rows() -> None:
    with pytest.raises(UserError, match="drop_last=True"):
        SupervisedRunner(device="cpu").predict(
            model=classifier(), loader=DataLoader(classification(), 4, drop_last=True)
        )


def test_evaluate_over_workers_equals_one_process() -> None:
    model, loaders = classifier(), {"valid": DataLoader(classification(), 8)}
    given: dict[str, Any] = {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "loaders": loaders,
        "metrics": ["accuracy"],
    }
    alone = SupervisedRunner(device="cpu").evaluate(**given)
    three = SupervisedRunner(device="cpu").evaluate(**given, distributed=True, workers=3)
    assert three["valid"]["accuracy"] == alone["valid"]["accuracy"]
    assert three["valid"]["loss"] == pytest.approx(alone["valid"]["loss"], rel=1e-6)


class Fails(Callback):
    """Does something terrible on rank 1 in the middle of the second epoch."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step_end(self, training: Any) -> None:
        if training.step != 5 or training.world.rank != 1:
            return
        training.loop.checkpoints.wait()  # the first epoch's checkpoint is whole
        if self.how == "raise":
            raise ValueError("planted fault")
        if self.how == "exit":
            sys.exit(0)
        if self.how == "os._exit":
            os._exit(0)
        if self.how == "exit 3":
            sys.exit(3)
        os.kill(os.getpid(), getattr(signal, self.how))


FAULTS = {
    "raise": "rank 1.*planted fault",
    "exit": r"rank 1.*sys\.exit\(\) with code 0",
    "os._exit": "rank 1.*code 0",
    "exit 3": "rank 1.*3",
    "SIGKILL": "rank 1.*SIGKILL",
    "SIGSTOP": "rank 1.*stopped",
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_rank_that_fails_is_named_within_seconds(how: str, tmp_path: Path) -> None:
    import re

    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        train(num_epochs=4, logdir=tmp_path, callbacks=[Fails(how)])
    assert time.monotonic() - started < patience(40)
    assert re.search(FAULTS[how], str(caught.value), re.DOTALL), str(caught.value)
    assert caught.value.rank == 1
    assert caught.value.exit_code != 0
    assert (tmp_path / "checkpoints" / "last" / "manifest.json").exists()


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(UserError, match=r"model.*lock.*_thread\.lock"):
        train(model=Locked())


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from allhands import SupervisedRunner
print("script body")

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
    def forward(self, x):
        return self.linear(x)

def own_loss(output, target):
    return ((output - target) ** 2).mean()

X = torch.rand(50, 3)
data = TensorDataset(X, X.sum(1, keepdim=True))
model = Own()
before = model.linear.weight.clone()
history = SupervisedRunner(device="cpu").train(
    model=model, criterion=own_loss, optimizer=torch.optim.Adam(model.parameters()), num_epochs=2,
    loaders={"train": DataLoader(data, 8), "valid": DataLoader(data, 8)},
    distributed=True, workers=2,
    metrics={"own": lambda output, target: (output - target).abs().mean()},
)
assert not torch.equal(before, model.linear.weight)
print("epochs", len(history["epoch"]))
"""


# rare: launch/test_spawn.py has it, and the scripts of examples/runner_tutorial have no guard.
@pytest.mark.rare
@pytest.mark.parametrize("how", ["script", "-c", "stdin"])
def test_no_main_guard_is_needed(how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = {"script": ["script.py"], "-c": ["-c", SCRIPT], "stdin": ["-"]}[how]
    done = subprocess.run(
        [sys.executable, *command],
        input=SCRIPT if how == "stdin" else None,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("script body") == 1
    assert done.stdout.endswith("epochs 2\n")


def test_data_is_built_only_in_the_workers(tmp_path: Path) -> None:
    def make(folder: str) -> dict[str, Any]:
        (Path(folder) / f"built-{os.getpid()}").touch()
        x = torch.rand(20, 5)
        return {"train": TensorDataset(x, torch.randint(0, 4, (20,)))}

    train(
        loaders=None,
        datasets={"batch_size": 4, "get_datasets_fn": make, "folder": str(tmp_path)},
        num_epochs=1,
    )
    built = {path.name for path in tmp_path.iterdir()}
    assert len(built) == 2
    assert f"built-{os.getpid()}" not in built
