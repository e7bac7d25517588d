"""Scripts whose workers are lost where their arguments say, and what one process comes to that
nothing disturbs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patience

# How each worker is to be lost: words like "2@13:SIGKILL", the rank under which it was started, and
# the steps (or "e1", the epoch whose evaluation follows) before it. "0@5:behind": rank 0 is told of
# the loss in the step after 5, before its update, and the others after theirs. "2@5:dies": so does
# rank 2 there. "1@4:stuck": rank 1 ends itself.
SCRIPT = """
import json, os, signal, sys, time
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import allhands

batch, pause, losses = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
torch.manual_seed(0)
x = torch.randn(83, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
data = TensorDataset(x, y)
loop = allhands.Loop(
    model=model, optimizer=optimizer, scheduler=(scheduler, "step"), logdir="logs",
    loaders={
        "train": DataLoader(data, batch_size=batch, shuffle=True),
        "valid": DataLoader(data, batch_size=batch),
    },
)

def loss_of(batch):
    inputs, targets = batch
    return {"loss": F.cross_entropy(loop.model(inputs), targets), "size": inputs.abs().mean()}

def maybe(place):
    for word in losses:
        who, _, kind = word.partition(":")
        restarted = os.environ.get("ALLHANDS_ELASTIC_JOINS")
        if who != f"{os.environ.get('RANK')}@{place}" or restarted:
            continue
        if "SIG" in kind:
            os.kill(os.getpid(), getattr(signal, kind))
        elif kind == "stuck":
            from allhands.loop import joining

            joining._drop_out("an operation did not end")

if any(word.endswith((":behind", ":dies")) for word in losses):
    from allhands.loop.shared_measures import SharedMeasures

    share = SharedMeasures.share

    def behind(self):
        share(self)
        if f"{os.environ.get('RANK')}@{loop.global_step}:dies" in losses:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{os.environ.get('RANK')}@{loop.global_step}:behind" in losses:
            losses.clear()
            raise RuntimeError("the connection is closed")

    SharedMeasures.share = behind

for epoch in loop.epochs(3):
    for batch in epoch.train:
        maybe(loop.global_step)
        loop.step(loss_of, batch)
        time.sleep(pause)
    maybe(f"e{epoch.number}")
    epoch.evaluate("valid", loss_of)
if loop.main:
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    with open("final.json", "w") as file:
        json.dump([weights, loop.history, loop.global_step, loop.world.world_size], file)
"""


def until_one_joins(script: str) -> str:
    """Steps that last until a worker has joined, and no longer."""
    waits = """\
        if os.environ.get("ALLHANDS_ELASTIC_JOINS"):
            open("joined", "w").close()
        time.sleep(0 if os.path.exists("joined") else pause)
"""
    changed = script.replace("        time.sleep(pause)\n", waits)
    assert changed != script
    return changed


class Runner:
    """The same training by a `SupervisedRunner`, with a metric that keeps all outputs."""

    SCRIPT = """
import json, os, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAUROC
import allhands
from allhands.world import current_world

losses = sys.argv[3:]
torch.manual_seed(0)
x = torch.randn(83, 6)
y = (x @ torch.randn(6, 3)).argmax(1)

class Data(Dataset):
    def __len__(self):
        return 83
    def __getitem__(self, index):
        return x[index], y[index]

class Loses(allhands.Callback):
    steps = 0
    def maybe(self, place):
        for word in losses:
            who, _, kind = word.partition(":")
            if who == f"{os.environ.get('RANK')}@{place}":
                os.kill(os.getpid(), getattr(signal, kind))
    def on_step_end(self, training):
        self.steps += 1
        self.maybe(training.step)
    def on_evaluate_start(self, training):
        self.maybe(f"e{training.epoch + 1}")

loses = Loses()
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
batch = int(sys.argv[1])
history = allhands.SupervisedRunner().train(
    model=model, criterion=torch.nn.CrossEntropyLoss(), num_epochs=3, callbacks=[loses],
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    metrics={"auc": MulticlassAUROC(3)},
    loaders={
        "train": DataLoader(Data(), batch_size=batch, shuffle=True),
        "valid": DataLoader(Data(), batch_size=batch),
    },
)
world = current_world()
if world is None or world.rank == 0:
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    with open("final.json", "w") as file:
        json.dump([weights, history, loses.steps, world.world_size if world else 1], file)
"""


def result(folder: Path) -> list[Any]:
    found: list[Any] = json.loads((folder / "final.json").read_text())
    return found


def alone(folder: Path, script: str, batch: int) -> list[Any]:
    """What one process comes to, undisturbed."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    words = [sys.executable, "script.py", str(batch), "0"]
    subprocess.run(words, cwd=folder, check=True, timeout=patience(120), capture_output=True)
    return result(folder)


def assert_same(mine: list[Any], theirs: list[Any], most: float = 1e-5) -> None:
    for own, other in zip(mine[0], theirs[0], strict=True):
        assert own == pytest.approx(other, rel=10 * most, abs=most)
    for loader in ("train", "valid"):
        assert mine[1][loader].keys() == theirs[1][loader].keys()
        for name, values in theirs[1][loader].items():
            assert mine[1][loader][name] == pytest.approx(values, rel=10 * most), (loader, name)
    assert mine[1]["step"] == theirs[1]["step"]
    assert mine[2] == theirs[2], "no step is lost or taken twice"
