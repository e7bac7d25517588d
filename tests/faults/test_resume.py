"""Interrupted trainings that go on: wrong samples after a resume, forgotten state, half-written
checkpoints.

An interrupted and resumed run must equal the uninterrupted one bit for bit on the same number of
workers, and sample for sample on another.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAUROC

import allhands
from allhands import Callback, EarlyStopping, SupervisedRunner
from tests.reference import relative_difference
from tests.worlds import in_world, preload

pytestmark = pytest.mark.serial

# What the process that forks the workers imports for this module.
METRICS = ("torchmetrics",)
SAMPLES = 54
EPOCHS = 2


class Recording(SupervisedRunner):
    """Keeps the ids of the samples that this rank trains on."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.ids: list[list[int]] = []

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        x, ids, y = batch
        if model.training:
            self.ids.append(ids.tolist())
        return model(x), y


class At(Callback):
    """Does something at one optimizer step, and keeps a number that must survive."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action, self.sum = step, action, 0.0

    def on_step_end(self, training: Any) -> None:
        self.sum = 0.5 * self.sum + training.step
        if training.step == self.step:
            self.action(training)

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum = state["sum"]


class Interrupted(Exception):
    pass


def raise_error(training: Any) -> None:
    raise Interrupted


def send_sigterm(training: Any) -> None:
    if training.step % training.world.world_size == training.world.rank:  # one rank only
        os.kill(os.getpid(), signal.SIGTERM)


def send_sigusr1(training: Any) -> None:
    if training.world.rank == 0:
        os.kill(os.getpid(), signal.SIGUSR1)


def send_sigkill(training: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nothing(training: Any) -> None:
    pass


def training(
    logdir: Path,
    step: int = 0,
    action: Any = nothing,
    dropout: float = 0.3,
    batch: int = 8,
    **changes: Any,
) -> Any:
    """One training, from the start or from what is in the logdir; everything that must be equal
    afterwards."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 5, generator=generator)
    y = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    data = TensorDataset(x, torch.arange(SAMPLES), y)
    torch.default_generator.manual_seed(1)
    norm = nn.BatchNorm1d(16) if dropout else nn.Identity()
    model = nn.Sequential(nn.Linear(5, 16), norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 40)
    callback, runner = At(step, action), Recording()
    history = runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=(schedule, "step"),
        loaders={"train": DataLoader(data, batch, shuffle=True), "valid": DataLoader(data, batch)},
        metrics={"accuracy": "accuracy", "auroc": MulticlassAUROC(num_classes=4)}
        if dropout
        else None,
        callbacks=[callback, EarlyStopping(5)],
        logdir=logdir,
        num_epochs=EPOCHS,
        resume="auto",
        **changes,
    )
    history.pop("seconds")
    return {
        "model": {key: value.clone() for key, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict()["state"],
        "history": history,
        "sum": callback.sum,
        "lr": schedule.get_last_lr(),
        "ids": runner.ids,
    }


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            same_bits(a, b) for a, b in zip(one, other, strict=True)
        )
    return one == other


def differing(whole: dict[str, Any], resumed: dict[str, Any]) -> list[str]:
    """What differs between an uninterrupted and a resumed training; of the ids, only the tail was
    seen again."""
    names = [name for name in whole if name != "ids" and not same_bits(whole[name], resumed[name])]
    tail = whole["ids"][len(whole["ids"]) - len(resumed["ids"]) :]
    return names + (["ids"] if tail != resumed["ids"] else [])


# ---------------------------------------------------------------------- the same world


def interrupted_at_each_step(folder: str) -> dict[str, Any]:
    """Interrupt at every step in two ways, go on, compare; on every rank of one world."""
    world = allhands.current_world()
    assert world is not None
    whole = training(Path(folder) / "whole")
    steps = whole["history"]["step"][-1]
    found: dict[str, Any] = {"steps": steps}
    for step in range(1, steps + 1):
        for action, save_every in ((raise_error, 2), (send_sigterm, None)):
            logdir = Path(folder) / f"{action.__name__}-{step}"
            with pytest.raises((Interrupted, SystemExit)) as ended:
                training(logdir, step, action, save_every=save_every)
            assert ended.type is Interrupted or ended.value.code == 128 + signal.SIGTERM  # type: ignore[union-attr]
            resumed = training(logdir)
            found[f"{action.__name__} {step}"] = differing(whole, resumed)
            if action is send_sigterm and len(resumed["ids"]) >= len(whole["ids"]):
                found[f"{action.__name__} {step}"].append("began anew")
    return found


# rare on 1 and 3: they take the same path as 2.
@pytest.mark.parametrize(
    "workers",
    [pytest.param(1, marks=pytest.mark.rare), 2, pytest.param(3, marks=pytest.mark.rare)],
)
@pytest.mark.slow
def test_interrupted_at_every_step_and_resumed_equals_uninterrupted_bit_for_bit(
    tmp_path: Path, workers: int
) -> None:
    for found in in_world(workers, interrupted_at_each_step, str(tmp_path), preload=METRICS):
        steps = found.pop("steps")
        assert len(found) == 2 * steps
        assert {name: problem for name, problem in found.items() if problem} == {}


# ---------------------------------------------------------------------- killed


def killed_at_each_step(folder: str, workers: int) -> None:
    """Run in a process of its own, which has imported torch but not used it: forks the workers,
    kills one, goes on."""
    preload()
    torch.set_num_threads(1)
    run_forked(Path(folder) / "whole", workers, 0, nothing)
    whole = torch.load(Path(folder) / "whole.pt", weights_only=False)
    steps = whole["history"]["step"][-1]
    for step in range(1, steps + 1):
        logdir = Path(folder) / f"killed-{step}"
        codes = run_forked(logdir, workers, step, send_sigkill_to_one)
        assert -signal.SIGKILL in codes, codes
        assert run_forked(logdir, workers, 0, nothing) == [0] * workers
        resumed = torch.load(logdir.with_suffix(".pt"), weights_only=False)
        print(step, differing(whole, resumed), len(whole["ids"]) - len(resumed["ids"]), flush=True)


def send_sigkill_to_one(training: Any) -> None:
    if training.step % training.world.world_size == training.world.rank:
        os.kill(os.getpid(), signal.SIGKILL)


def run_forked(logdir: Path, workers: int, step: int, action: Any) -> list[int]:
    """One training in forked processes; rank 0 leaves its result beside the logdir."""
    meeting = logdir.with_name(f"{logdir.name}-{step}-meeting")
    children = []
    for rank in range(workers):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                allhands.init(
                    device="cpu",
                    init_method=f"file://{meeting}",
                    rank=rank,
                    world_size=workers,
                    timeout=60,
                )
                result = training(logdir, step, action, save_every=1)
                if rank == 0:
                    torch.save(result, logdir.with_suffix(".pt"))
                allhands.finalize()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.rare), 2])
@pytest.mark.slow
def test_killed_at_every_step_and_resumed_equals_uninterrupted_bit_for_bit(
    tmp_path: Path, workers: int
) -> None:
    code = (
        "from tests.faults.test_resume import killed_at_each_step; "
        f"killed_at_each_step({str(tmp_path)!r}, {workers})"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    lines = [
        line.split() for line in done.stdout.splitlines() if line[:1].isdigit() and "[]" in line
    ]
    steps = 14 if workers == 1 else 8
    assert [int(line[0]) for line in lines] == list(range(1, steps + 1)), (
        done.stdout[-2000:] + done.stderr[-4000:]
    )
    # Each time something was saved before the kill, except possibly at the first steps.
    assert sum(int(line[2]) > 0 for line in lines) >= steps - 3


# ---------------------------------------------------------------------- another world


STOPS = [1, 4, 5, 7, 9]  # within the first epoch, at its end, within the second
GLOBAL_BATCH = 12


def stop_here(training: Any) -> None:
    training.stop("another number of workers goes on", now=True)


def each_logdir(folder: str, workers: int, stops: bool) -> list[Any]:
    """Stop at each step, or go on from there, with this many workers; without dropout, and with the
    same global batch."""
    return [
        training(
            Path(folder) / str(step),
            step,
            stop_here if stops else nothing,
            dropout=0.0,
            batch=GLOBAL_BATCH // workers,
        )
        for step in STOPS
    ]


def by_step(ranks: list[Any]) -> list[list[int]]:
    """The ids of each step, those of all ranks put together."""
    return [
        [sample for rank in ranks for sample in rank["ids"][step]]
        for step in range(len(ranks[0]["ids"]))
    ]


# rare: 2 and 3 are several workers before and after.
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(1, 2, marks=pytest.mark.rare),
        (2, 3),
        pytest.param(4, 1, marks=pytest.mark.rare),
    ],
)
@pytest.mark.slow
def test_another_number_of_workers_goes_on_with_the_same_samples_and_weights_to_rounding(
    tmp_path: Path, before: int, after: int
) -> None:
    whole = training(tmp_path / "whole", dropout=0.0, batch=GLOBAL_BATCH)
    first = in_world(before, each_logdir, str(tmp_path), before, True, preload=METRICS)
    second = in_world(after, each_logdir, str(tmp_path), after, False, preload=METRICS)
    for number, step in enumerate(STOPS):
        ids = by_step([rank[number] for rank in first]) + by_step([rank[number] for rank in second])
        assert ids == whole["ids"]
        resumed = second[0][number]
        assert relative_difference(resumed["model"], whole["model"]) < 1e-5, step
        assert resumed["history"]["step"] == whole["history"]["step"]
        for loader in ("train", "valid"):
            assert resumed["history"][loader]["loss"] == pytest.approx(
                whole["history"][loader]["loss"], rel=1e-5
            )


# ---------------------------------------------------------------------- during evaluation


def interrupted_in_evaluation(folder: str) -> dict[str, list[str]]:
    """A signal in the middle of the evaluation: the epoch is not trained again, and not evaluated
    twice."""
    world = allhands.current_world()
    assert world is not None
    whole = training(Path(folder) / "whole")
    found = {}
    for batch in (1, 3):
        logdir = Path(folder) / f"evaluation-{batch}"
        original, seen = Recording.handle_batch, []

        def handle_batch(
            self: Any,
            model: nn.Module,
            given: Any,
            original: Any = original,
            seen: Any = seen,
            at: int = batch,
        ) -> Any:
            if not model.training:
                seen.append(1)
                if len(seen) == at and world.rank == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
            return original(self, model, given)

        Recording.handle_batch = handle_batch  # type: ignore[method-assign]
        try:
            with pytest.raises(SystemExit):
                training(logdir)
        finally:
            Recording.handle_batch = original  # type: ignore[method-assign]
        state = allhands.load_checkpoint(logdir)
        resumed = training(logdir)
        found[f"{batch}"] = differing(whole, resumed)
        if state["position"] is None or not state["position"]["evaluating"]:
            found[f"{batch}"].append("was not interrupted in the evaluation")
    return found


# rare on 1: 2 have what one has.
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.rare), 2])
def test_interrupted_in_the_evaluation(tmp_path: Path, workers: int) -> None:
    for found in in_world(workers, interrupted_in_evaluation, str(tmp_path), preload=METRICS):
        assert found == {"1": [], "3": []}
