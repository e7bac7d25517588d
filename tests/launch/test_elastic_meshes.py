"""Trainings in parts that go on with the copies of the model that are whole: the same weights and
metrics as one process that nothing disturbed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.patience import patience

from .conftest import Job
from .elastic_jobs import SCRIPT as OWN_STEPS
from .elastic_jobs import alone, assert_same, result, until_one_joins

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

# How workers are to be lost, as in `elastic_jobs`.
SCRIPT = """
import json, os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import allhands
from allhands.models import MLP
from allhands.world import current_world

strategy, batch, pause, losses = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
from allhands import FSDP, Mesh, Pipeline, Tensor

torch.manual_seed(0)
x = torch.randn(83, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
first = not os.environ.get("ALLHANDS_ELASTIC_JOINS")

class Loses(allhands.Callback):
    steps = 0
    def maybe(self, place):
        for word in losses:
            who, _, kind = word.partition(":")
            if who == f"{os.environ.get('RANK')}@{place}" and "SIG" in kind and first:
                os.kill(os.getpid(), getattr(signal, kind))
    def on_step_end(self, training):
        self.steps += 1
        if not first:
            open("joined", "w").close()
        time.sleep(0 if os.path.exists("joined") else pause)
        self.maybe(training.step)
    def on_evaluate_start(self, training):
        self.maybe(f"e{training.epoch + 1}")

from allhands.loop.shared_measures import SharedMeasures

share = SharedMeasures.share

def behind(self):
    share(self)
    place = f"{os.environ.get('RANK')}@{self._loop.global_step}"
    if f"{place}:dies" in losses:
        os.kill(os.getpid(), signal.SIGKILL)
    if f"{place}:behind" in losses:
        losses.clear()
        raise RuntimeError("the connection is closed")

SharedMeasures.share = behind

model = MLP(6, (16, 24, 16), 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
history = allhands.SupervisedRunner(device="cpu").train(
    model=model, criterion=torch.nn.CrossEntropyLoss(), optimizer=optimizer, clip_norm=0.5,
    num_epochs=3, callbacks=[loses := Loses()], distributed=eval(strategy),
    scheduler=(torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5), "step"),
    loaders={
        "train": DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True),
        "valid": DataLoader(TensorDataset(x, y), batch_size=batch),
    },
)
world = current_world()
if world is None or world.rank == 0:
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    weights += [s["exp_avg"].flatten().tolist() for s in optimizer.state.values()]
    with open("final.json", "w") as file:
        json.dump([weights, history, history["step"][-1], world.world_size if world else 1], file)
"""
SHARDS = "Mesh(dp={'replicate': 2, 'shard': 2})"
SLICES = "Mesh(dp=2, tp=2, tensor=Tensor(plan='mlp'))"
STAGES = "Mesh(dp=2, pp=2)"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one process comes to."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "script.py").write_text(SCRIPT)
    subprocess.run(
        [sys.executable, "script.py", "None", "12", "0"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=patience(120),
        capture_output=True,
    )
    return result(folder)


def shares(strategy: str) -> int:
    return 4 if "shard" in strategy or strategy == "FSDP()" else 2


def run(job: Job, words: tuple[str, ...], strategy: str, *losses: str, pause: float = 0) -> Any:
    script = job.script(SCRIPT)
    batch = str(12 // shares(strategy))
    given = ("--elastic", *words, script, strategy, batch, str(pause), *losses)
    return job.run("-n", "4", *given, timeout=150)


# Copies are the ranks 0, 1 and 2, 3; of stages, 0, 2 and 1, 3.
@pytest.mark.parametrize(
    ("strategy", "losses"),
    [
        (SHARDS, ["3@5:SIGKILL"]),
        # rank 0 is not as far as rank 1
        (SHARDS, ["2@5:dies", "0@5:behind"]),
        (SLICES, ["1@e2:SIGKILL"]),
        (SLICES, ["2@5:SIGSTOP"]),
        (STAGES, ["1@4:SIGTERM"]),
        # the rows above have each way to be lost, and each kind of parts
        pytest.param(SLICES, ["0@5:dies", "3@5:behind"], marks=pytest.mark.rare),
        pytest.param(STAGES, ["0@5:SIGKILL"], marks=pytest.mark.rare),
        pytest.param(STAGES, ["3@5:dies", "2@5:behind"], marks=pytest.mark.rare),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_the_whole_copy_goes_on_with_the_same_result(
    job: Job, undisturbed: list[Any], strategy: str, losses: list[str]
) -> None:
    code, out, err = run(job, (), strategy, *losses)
    assert code == 0, out + err
    found = result(job.folder)
    assert found[3] == 2
    assert "2 workers repeat what was interrupted" in out
    assert re.search(r"rank \d leaves, as its copy of the model has lost a part", err)
    assert_same(found, undisturbed)


# The order of the ranks is that of stages, and the parts are those of slices and shards.
@pytest.mark.parametrize(
    "strategy",
    [
        STAGES,
        pytest.param(SHARDS, marks=pytest.mark.rare),  # covered by the loop of one's own below
        pytest.param(SLICES, marks=pytest.mark.rare),
    ],
)
def test_a_copy_joins_once_it_is_whole(job: Job, undisturbed: list[Any], strategy: str) -> None:
    code, out, err = run(job, ("--max-restarts", "1"), strategy, "0@3:SIGKILL", pause=0.7)
    assert code == 0, out + err
    assert "started again (1 of 1)" in err
    assert "started again, and takes part once a copy is whole" in err
    assert "membership 2: 2 workers joined; 4 workers go on" in out
    found = result(job.folder)
    assert found[3] == 4
    assert_same(found, undisturbed)


@pytest.mark.parametrize(
    ("words", "losses", "pause"),
    [((), ["2@5:dies", "0@5:behind"], 0), (("--max-restarts", "1"), ["0@3:SIGKILL"], 0.8)],
    ids=["behind", "joins"],
)
def test_steps_of_ones_own_go_on_too(
    job: Job, words: tuple[str, ...], losses: list[str], pause: float
) -> None:
    plain = OWN_STEPS.replace('logdir="logs"', 'logdir="logs", save_every=4, clip_norm=0.5')
    script = until_one_joins(plain.replace("clip_norm", f"strategy=allhands.{SHARDS}, clip_norm"))
    given = ("--elastic", *words, job.script(script), "3", str(pause), *losses)
    code, out, err = job.run("-n", "4", *given, timeout=150)
    assert code == 0, out + err
    found = result(job.folder)
    assert found[3] == (4 if words else 2)
    assert_same(found, alone(job.folder / "alone", plain, 12))


def test_what_a_callback_keeps_in_parts_is_refused_by_name(job: Job) -> None:
    script = SCRIPT.replace("callbacks=[", "callbacks=[allhands.AveragedWeights(0.9), ")
    given = ("--elastic", job.script(script), SHARDS, "3", "0", "3@5:SIGKILL")
    code, out, err = job.run("-n", "4", *given, timeout=100)
    assert code != 0
    assert "AveragedWeights keeps tensors in parts as the model's" in out + err


def test_a_job_without_a_whole_copy_ends(job: Job) -> None:
    code, out, err = run(job, (), SHARDS, "1@5:SIGKILL", "2@5:SIGKILL")
    assert code != 0
    assert "no whole copy of the model is left" in err, out


def test_a_single_copy_is_said_to_end_with_a_worker(job: Job) -> None:
    code, out, err = run(job, (), "FSDP()", "1@5:SIGKILL")
    assert code != 0
    assert "a lost worker ends this training in spite of --elastic: strategy 'fsdp' keeps" in out
    assert "Mesh(dp={'replicate': 2" in out
    assert "cannot go on without starting again" in out + err
