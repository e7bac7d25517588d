"""Ranks that must decide together: early stopping, best epoch, plateau, resume, and calls that one
rank makes alone."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import Callback, EarlyStopping, SupervisedRunner, UserError, WorkerError
from allhands.launch import spawn
from tests.patience import patience
from tests.runner.problems import arguments, classification, classifier
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


def train(**changes: Any) -> dict[str, Any]:
    """With small batches, so that three ranks share 53 samples unevenly."""
    data = classification()
    loaders = {"train": DataLoader(data, 4, shuffle=True), "valid": DataLoader(data, 5)}
    return SupervisedRunner(device="cpu").train(**arguments(**{"loaders": loaders, **changes}))


class Worsens(Callback):
    """Makes the model worse after the second epoch, so that patience runs out."""

    def on_epoch_start(self, training: Any) -> None:
        for group in training.optimizer.param_groups:
            group["lr"] = 0.05 if training.epoch < 2 else -0.05


def early_stopping() -> Any:
    history = train(num_epochs=20, callbacks=[Worsens(), EarlyStopping(2)])
    return history["epoch"], history["valid"]["loss"]


def plateau() -> Any:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    history = train(num_epochs=6, model=model, optimizer=optimizer, scheduler=schedule)
    return history["lr"]


def logged_on_one_rank() -> str:
    world = allhands.current_world()
    assert world is not None

    class Logs(Callback):
        def on_step_end(self, training: Any) -> None:
            if training.world.rank == 0:
                training.log("norm", 1.0)

    try:
        train(num_epochs=1, callbacks=[Logs()])
    except UserError as error:
        return str(error)
    return "no error"


def different_logdirs(folder: str) -> Any:
    """Rank 0 has a checkpoint; the others look in folders of their own, and go on from rank 0's all
    the same."""
    world = allhands.current_world()
    assert world is not None
    own = Path(folder) / f"rank-{world.rank}"
    own.mkdir(parents=True)
    return train(num_epochs=3, resume="auto", logdir=folder if world.rank == 0 else own)["epoch"]


class Weights(Callback):
    """The weights before the first step, and after every step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_epoch_start(self, training: Any) -> None:
        self.on_step_end(training)

    def on_step_end(self, training: Any) -> None:
        self.seen.append(
            torch.cat([p.detach().flatten().clone() for p in training.model.parameters()])
        )


def nan_on_the_last_rank(samples: int, accumulate: int, precision: str) -> Any:
    """The sample that the last rank takes last in the second step is not a number; what is said,
    and the steps taken."""
    world = allhands.current_world()
    assert world is not None
    x, y = classification(samples).tensors
    x = x.clone()
    step = 4 * world.world_size * accumulate
    x[min(2 * step, samples) - 1] = float("nan")
    model, weights = classifier(), Weights()
    try:
        train(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            num_epochs=1,
            callbacks=[weights],
            accumulate=accumulate,
            precision=precision,
            loaders={"train": DataLoader(TensorDataset(x, y), 4)},
        )
    except UserError as error:
        now = torch.cat([p.detach().flatten() for p in model.parameters()])
        return str(error).split(".")[0], len(weights.seen) - 1, torch.equal(now, weights.seen[-1])
    return "no error"


NAN_CASES = [(48, 1, "fp32"), (96, 2, "fp32"), (48, 1, "fp16"), (48, 1, "bf16"), (13, 1, "fp32")]


def everything(folder: str) -> dict[str, Any]:
    world = allhands.current_world()
    assert world is not None
    train(num_epochs=2, logdir=folder)
    return {
        "early stopping": early_stopping(),
        "plateau": plateau(),
        "logged": logged_on_one_rank(),
        "nan": [nan_on_the_last_rank(*case) for case in NAN_CASES],
        "resumed": different_logdirs(folder),
        "best": os.readlink(Path(folder) / "checkpoints" / "best"),
    }


# rare on 2: 3 have what 2 have.
@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.rare), 3])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return in_world(request.param, everything, str(tmp_path_factory.mktemp("logs")))


def test_all_ranks_stop_early_at_the_same_epoch_for_the_same_numbers(
    ranks: list[dict[str, Any]],
) -> None:
    epochs, losses = ranks[0]["early stopping"]
    assert epochs == [1, 2, 3, 4]
    assert all(found["early stopping"] == (epochs, losses) for found in ranks)


def test_a_plateau_lowers_the_rate_on_all_ranks_alike(ranks: list[dict[str, Any]]) -> None:
    rates = ranks[0]["plateau"]
    assert rates[-1] < rates[0]
    assert all(found["plateau"] == rates for found in ranks)


def test_the_best_epoch_is_one_for_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert len({found["best"] for found in ranks}) == 1


def test_all_ranks_go_on_from_the_checkpoint_that_rank_0_found(ranks: list[dict[str, Any]]) -> None:
    assert [found["resumed"] for found in ranks] == [[1, 2, 3]] * len(ranks)


def test_what_one_rank_alone_logs_is_told_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        if len(ranks) == 1:
            assert found["logged"] == "no error"
        else:
            assert "training.log('norm', …) was called on rank 0 only, of" in found["logged"]


def test_a_loss_that_is_not_finite_ends_all_ranks_at_the_same_step_with_unchanged_weights(
    ranks: list[dict[str, Any]],
) -> None:
    last = f" on rank {len(ranks) - 1}" if len(ranks) > 1 else ""
    for rank, found in enumerate(ranks):
        for said, steps, unchanged in found["nan"][:4]:
            assert f"the training loss is nan{last} (epoch 1, batch" in said, rank
            assert (steps, unchanged) == (1, True)
        # 13 samples: with three ranks, two of them have nothing to do in the second step.
        said, steps, unchanged = found["nan"][4]
        assert "the training loss is nan" in said
        assert (steps, unchanged) == (1, True)


# ------------------------------------------------------------------ calls that one rank makes alone


class SavesAlone(Callback):
    """At a pace at which nobody waits for anybody."""

    def on_step_end(self, training: Any) -> None:
        time.sleep(1.2)
        if training.world.rank == 0 and training.step == 2:
            training.save_checkpoint()


class LeavesAlone(Callback):
    def on_step_end(self, training: Any) -> None:
        if training.world.rank == 1 and training.step == 2:
            training.stop("on a whim", now=True)


def alone(callback: Callback, logdir: str) -> None:
    allhands.init(device="cpu")
    train(num_epochs=20, logdir=logdir, callbacks=[callback])


@pytest.mark.parametrize(
    ("callback", "workers"), [(SavesAlone(), 2), (SavesAlone(), 3), (LeavesAlone(), 2)]
)
def test_a_call_of_one_rank_alone_is_named_within_seconds(
    tmp_path: Path, callback: Callback, workers: int
) -> None:
    rank = 1 if isinstance(callback, LeavesAlone) else 0
    others = [other for other in range(workers) if other != rank]
    started = time.monotonic()
    with pytest.raises(WorkerError, match="the ranks do not make the same calls") as error:
        spawn(alone, (callback, str(tmp_path)), workers=workers)
    # A hang would last for the group's ten minutes.
    assert time.monotonic() - started < patience(60)
    assert re.search(
        rf"rank {rank} (is|was) in 'saving a checkpoint after optimizer step 2'", str(error.value)
    )
    named = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    assert re.search(
        rf"{named} (is|are|was|were) in '(optimizer step 3|agreeing whether to go on)'",
        str(error.value),
    )


def wait_alone(logdir: str) -> Any:
    allhands.init(device="cpu")

    class Slow(Callback):
        def on_epoch_end(self, training: Any) -> None:
            if training.world.rank == 0:
                time.sleep(4.0)

    return train(num_epochs=1, callbacks=[Slow()])["epoch"]


def test_a_slow_rank_is_no_error(tmp_path: Path) -> None:
    assert spawn(wait_alone, (str(tmp_path),), workers=2) == [[1], [1]]
