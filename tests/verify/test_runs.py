"""The files through which the runs of a comparison get their objects."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from allhands.errors import UserError
from allhands.verify.runner_runs import RunnerRuns
from tests.patience import patience
from tests.verify.problems import network, verified

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]

SLOW = """
import time
from allhands import SupervisedRunner
from allhands.launch import ship
from tests.verify.problems import verified

class Slow(SupervisedRunner):
    def handle_batch(self, model, batch):
        print("training", flush=True)
        time.sleep(0.2)
        return super().handle_batch(model, batch)

made = ship.make_directory
def told(nbytes=0):
    folder = made(nbytes)
    print(folder, flush=True)
    return folder
ship.make_directory = told
verified(runner=Slow(device="cpu"), steps=50)
"""


# rare: the signals take the same way.
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.rare)]
)
def test_a_signal_leaves_no_file_behind(number: signal.Signals) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert process.stdout.readline() == "training\n"
    assert list(folder.glob("shipped-*"))
    process.send_signal(number)
    _, stderr = process.communicate(timeout=patience(60))
    # Python 3.12 ends with 1 after a KeyboardInterrupt in what -c runs.
    assert process.returncode in (143, -signal.SIGINT, 1), stderr
    assert not folder.exists()


def test_what_cannot_be_sent_to_workers_is_named() -> None:
    model = network()
    model.lock = threading.Lock()
    with pytest.raises(UserError, match=r"model.*lock"):
        verified(model=model)


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"steps_per_epoch": 2}, [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]),
        ({"evaluate_every": 3, "plateau": True}, [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]),
    ],
)
def test_schedules_step_as_in_the_training(
    changes: dict[str, Any], rates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if changes.pop("plateau", False):
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", factor=0.5, patience=0, threshold=1e9
        )
        schedule.best = 1e9
    found: list[list[float]] = []
    alone = RunnerRuns.alone

    def spied(self: RunnerRuns, *given: Any, **options: Any) -> Any:
        trace = alone(self, *given, **options)
        found.append([step["rates"][0] for step in trace.steps])
        return trace

    monkeypatch.setattr(RunnerRuns, "alone", spied)
    assert verified(model=model, optimizer=optimizer, scheduler=schedule, **changes).ok
    assert found[0] == rates
