"""Training by steps: `max_steps`, and evaluations every so many steps."""

from __future__ import annotations

import csv
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from allhands import (
    DDP,
    FSDP,
    Callback,
    EarlyStopping,
    Federated,
    KVStore,
    SupervisedRunner,
    UserError,
)
from allhands.cli import run_training
from allhands.config import read_run
from tests.reference import global_batches, train_by_hand
from tests.runner.problems import StopAt, arguments, classification, classifier, fit
from tests.worlds import in_world

# 53 samples: 7 global batches of 8, the last of which has 5.
SAMPLES, GLOBAL, SEED, STEPS, EVERY = 53, 8, 42, 17, 5
ROWS = [5, 10, 15, 17]


def by_hand() -> tuple[nn.Module, list[float], list[float], list[float]]:
    """The model, and of each row the mean loss of its steps, the loss of all data, and the steps'
    learning rate."""
    model, criterion = classifier(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    tensors = classification().tensors
    batches = list(zip(range(STEPS), global_batches(SAMPLES, GLOBAL, SEED), strict=False))
    sizes = [len(rows) for _, rows in batches]
    trained, valid, rates, losses = [], [], [], []
    for first, last in zip([0, *ROWS], ROWS, strict=False):
        rows = iter([rows for _, rows in batches[first:last]])
        losses += train_by_hand(
            model, criterion, optimizer, tensors, rows, last - first, after_step=schedule.step
        )
        part = slice(first, last)
        pairs = zip(losses[part], sizes[part], strict=True)
        trained.append(sum(loss * size for loss, size in pairs) / sum(sizes[part]))
        with torch.no_grad():
            valid.append(float(criterion(model(tensors[0]), tensors[1])))
        rates.append(optimizer.param_groups[0]["lr"])
    return model, trained, valid, rates


def train(workers: int, strategy: Any = False, **changes: Any) -> tuple[Any, Any]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    loader = DataLoader(classification(), GLOBAL // workers, shuffle=True)
    given: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": (schedule, "step"),
        "loaders": {"train": loader, "valid": DataLoader(classification(), 6)},
        "num_epochs": None,
        "max_steps": STEPS,
        "evaluate_every": EVERY,
        "distributed": strategy,
    }
    _, history = fit(**given | changes)
    return {name: value.clone() for name, value in model.state_dict().items()}, history


def assert_by_hand(weights: dict[str, torch.Tensor], history: Any) -> None:
    model, trained, valid, rates = by_hand()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
    assert history["step"] == ROWS
    assert history["epoch"] == [1, 2, 3, 3]
    assert history["train"]["loss"] == pytest.approx(trained, abs=1e-5)
    assert history["valid"]["loss"] == pytest.approx(valid, abs=1e-5)
    assert history["lr"] == pytest.approx(rates, abs=1e-9)


def test_one_process_is_the_loop_by_hand() -> None:
    assert_by_hand(*train(1))


@pytest.mark.serial
@pytest.mark.parametrize(
    "strategy",
    [DDP(), DDP(optimizer_state="sharded"), FSDP(), KVStore()],
    ids=["ddp", "sharded", "fsdp", "kvstore"],
)
def test_two_workers_are_the_loop_by_hand(strategy: Any, preloaded: None) -> None:
    for weights, history in in_world(2, train, 2, strategy):
        assert_by_hand(weights, history)


def test_rows_span_epochs_that_are_shorter() -> None:
    _, longer = train(1, evaluate_every=5, steps_per_epoch=2)
    assert longer["epoch"] == [3, 5, 8, 9]
    _, whole = train(1)
    assert longer["train"] == whole["train"]
    assert longer["valid"] == whole["valid"]


def test_without_evaluations_epochs_end_with_rows() -> None:
    weights, history = train(1, evaluate_every=None)
    assert history["step"] == [7, 14, 17]
    assert history["epoch"] == [1, 2, 3]
    assert all(torch.equal(weights[name], value) for name, value in train(1)[0].items())


@pytest.mark.parametrize(
    ("epochs", "steps", "rows"), [(2, 100, [7, 14]), (5, 9, [7, 9]), (2, 14, [7, 14])]
)
def test_what_comes_first_ends_the_training(epochs: int, steps: int, rows: list[int]) -> None:
    assert train(1, num_epochs=epochs, max_steps=steps, evaluate_every=None)[1]["step"] == rows


def test_the_last_step_is_evaluated_once() -> None:
    assert train(1, num_epochs=2, max_steps=None, evaluate_every=7)[1]["step"] == [7, 14]
    assert train(1, max_steps=10, evaluate_every=5)[1]["step"] == [5, 10]
    assert train(1, max_steps=4, evaluate_every=100)[1]["step"] == [4]


def test_check_and_overfit_keep_their_meaning() -> None:
    assert train(1, check=True, max_steps=1000)[1]["step"] == [3, 6, 9]
    assert train(1, overfit=True, max_steps=7, evaluate_every=None)[1]["step"] == list(range(1, 8))


def test_schedules_are_as_long_as_the_steps() -> None:
    def cycle(length: int) -> Any:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=length)
        return train(1, model=model, optimizer=optimizer, scheduler=schedule)

    assert cycle(STEPS)[1]["step"] == ROWS
    with pytest.raises(UserError, match=f"write total_steps={STEPS}"):
        cycle(STEPS - 1)


def test_a_plateau_is_looked_for_at_each_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="max", factor=0.5, patience=0
    )
    train(1, model=model, optimizer=optimizer, scheduler=plateau)
    assert "ReduceLROnPlateau steps once an evaluation" in capsys.readouterr().out
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8  # the loss falls, so none after the first


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        rows = classification()
        return (rows[number % SAMPLES] for number in itertools.count())


def test_a_stream_without_an_end() -> None:
    data = {"train": DataLoader(Endless(), GLOBAL)}
    assert train(1, loaders=data)[1]["step"] == ROWS
    assert train(1, loaders=data, evaluate_every=None)[1]["step"] == [STEPS]


def test_a_run_file_trains_by_steps(tmp_path: Path) -> None:
    fixed = "data: {name: digits, batch_size: 64, limit: 200}\nmodel: {name: mlp}\nworkers: 1\n"
    path = tmp_path / "run.yml"
    path.write_text(f"{fixed}device: cpu\nlogdir: {tmp_path}\nmax_steps: 9\nevaluate_every: 4\n")
    history = run_training.train(read_run([path]))
    assert history["step"] == [4, 8, 9]
    assert read_run([tmp_path / "run.yml"]).config.num_epochs is None


# ---------------------------------------------------------------------- going on


def assert_same_rows(found: Any, expected: Any) -> None:
    for history in (found, expected):
        history.pop("seconds", None)
    assert found == expected


@pytest.mark.parametrize("at", [3, 5, 8, 14, 16])
def test_a_resumed_training_is_the_same_to_the_bit(tmp_path: Path, at: int) -> None:
    def run(**changes: Any) -> Any:
        return train(
            1,
            model=(model := classifier(0.3)),
            optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
            scheduler=None,
            metrics=["accuracy"],
            **changes,
        ), model

    (_, history), model = run()
    run(logdir=tmp_path, callbacks=[StopAt(at)])
    (_, resumed), again = run(logdir=tmp_path, callbacks=[Callback()], resume="auto")
    assert_same_rows(resumed, history)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == ROWS
    assert [float(row["valid_loss"]) for row in rows] == history["valid"]["loss"]


class TermInEvaluation(SupervisedRunner):
    """Gets SIGTERM in the evaluation after a step."""

    def __init__(self, step: int | None) -> None:
        super().__init__(device="cpu")
        self.step, self.seen = step, 0

    def handle_batch(self, model: nn.Module, batch: Any) -> Any:
        self.seen += model.training
        if self.seen == self.step and not model.training:
            self.step = None
            os.kill(os.getpid(), signal.SIGTERM)
        return super().handle_batch(model, batch)


@pytest.mark.parametrize("at", [10, STEPS])
def test_a_signal_need_not_wait_for_the_end_of_an_evaluation(tmp_path: Path, at: int) -> None:
    def run(step: int | None, **changes: Any) -> Any:
        given = arguments(
            dropout=0.3, num_epochs=None, max_steps=STEPS, evaluate_every=EVERY, **changes
        )
        return TermInEvaluation(step).train(**given), given["model"]

    history, model = run(None)
    with pytest.raises(SystemExit):
        run(at, logdir=tmp_path)
    resumed, again = run(None, logdir=tmp_path, resume="auto")
    assert_same_rows(resumed, history)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


class Seen(SupervisedRunner):
    """Notes the samples that are trained on, and what each batch is for."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.samples: list[float] = []
        self.training: list[bool] = []

    def handle_batch(self, model: nn.Module, batch: Any) -> Any:
        self.training.append(model.training)
        if model.training:
            self.samples += batch[0][:, 0].tolist()
        return super().handle_batch(model, batch)


def test_more_steps_go_on_in_the_data(tmp_path: Path) -> None:
    def samples(steps: int, **changes: Any) -> list[float]:
        runner = Seen()
        runner.train(**arguments(num_epochs=None, max_steps=steps, **changes))
        return runner.samples

    parts = samples(3, logdir=tmp_path) + samples(9, logdir=tmp_path, resume="auto")
    assert parts == samples(9)
    with pytest.raises(
        UserError, match=r"written with steps_per_epoch=… or max_steps=….*or max_steps"
    ):
        fit(logdir=tmp_path, resume="auto")
    # An interrupted training by epochs may go on by steps.
    aside = tmp_path / "epochs"
    fit(logdir=aside, callbacks=[StopAt(5)])
    runner = Seen()
    runner.train(
        **arguments(
            num_epochs=None, max_steps=9, logdir=aside, callbacks=[Callback()], resume="auto"
        )
    )
    assert runner.samples == samples(9)[5 * 8 :]


# ---------------------------------------------------------------------- best, and stopping


class Losses(Callback):
    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.epochs: list[int] = []

    def on_row_end(self, training: Any) -> None:
        self.rows.append((training.epoch, training.step))

    def on_epoch_end(self, training: Any) -> None:
        self.epochs.append(training.step)


@pytest.mark.parametrize("logs", [False, True])
def test_the_best_evaluation_is_kept(
    logs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 if step < 9 else -1)
    keep = Losses()
    data = classification()
    history = SupervisedRunner(device="cpu").train(
        **arguments(
            model=model,
            optimizer=optimizer,
            scheduler=(schedule, "step"),
            num_epochs=3,
            evaluate_every=3,
            load_best_on_end=True,
            callbacks=[keep],
            logdir=tmp_path if logs else None,
        )
    )
    losses = history["valid"]["loss"]
    assert history["step"] == [3, 6, 9, 12, 15, 18, 21]
    assert keep.epochs == [7, 14, 21]
    assert keep.rows[:3] == [(0, 3), (0, 6), (1, 9)]
    assert min(losses) == losses[2]
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model.eval()(data.tensors[0]), data.tensors[1]))
    assert loss == pytest.approx(losses[2], abs=1e-6)
    assert "best evaluation, after optimizer step 9" in capsys.readouterr().out


def test_early_stopping_counts_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    _, history = train(1, callbacks=[EarlyStopping(2, min_delta=100.0)], max_steps=1000)
    assert history["step"] == [5, 10, 15]
    assert "has not improved for 2 evaluations" in capsys.readouterr().out


def test_an_evaluation_changes_nothing_that_is_trained() -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))

    found = []
    for every in (None, 3):
        one = model()
        fit(model=one, num_epochs=2, evaluate_every=every)
        found.append(one.state_dict())
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
    runner = Seen()
    runner.train(**arguments(num_epochs=1, evaluate_every=3))
    assert runner.training == [*[True] * 3, *[False] * 7] * 2 + [True] + [False] * 7


# ---------------------------------------------------------------------- what is refused


def two_loaders() -> Iterator[Any]:
    for name in ("train_a", "train_b"):
        yield name, DataLoader(TensorDataset(torch.zeros(4, 5), torch.zeros(4).long()), 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_steps": 0}, "max_steps=0; it must be a whole number of optimizer steps"),
        ({"evaluate_every": 2.5}, "evaluate_every=2.5; it must be a whole number"),
        ({"num_epochs": 0}, "num_epochs=0; it must be a whole number"),
        ({"loaders": dict(two_loaders())}, "max_steps=17 counts the steps of one loader, and an"),
        (
            {"distributed": Federated(clients=2, rounds=1)},
            "max_steps=17 with distributed=Federated.*rounds=",
        ),
        (
            {"distributed": Federated(clients=2, rounds=1), "max_steps": None, "num_epochs": 1},
            "evaluate_every=5 with distributed=Federated.*evaluate_every=",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(changes: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        train(1, changes.pop("distributed", False), **changes)
