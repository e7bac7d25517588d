"""`SupervisedRunner.train` in one process: history, schedules, callbacks, files, resume,
randomness."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import Callback, EarlyStopping, SupervisedRunner
from tests.runner.problems import arguments, classification, classifier, fit


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_history_is_plain_and_complete() -> None:
    _, history = fit()
    assert history["epoch"] == [1, 2, 3]
    assert history["step"] == [7, 14, 21]
    assert set(history) == {"epoch", "step", "lr", "seconds", "train", "valid"}
    assert all(
        len(history[loader][name]) == 3
        for loader in ("train", "valid")
        for name in ("loss", "accuracy")
    )
    assert history["valid"]["loss"][-1] < history["valid"]["loss"][0]
    json.dumps(history)


def test_valid_loss_is_that_of_the_trained_model() -> None:
    model, history = fit(num_epochs=2)
    x, y = classification().tensors
    model.eval()
    with torch.no_grad():
        assert history["valid"]["loss"][-1] == pytest.approx(
            float(nn.functional.cross_entropy(model(x), y)), rel=1e-6
        )
        assert history["valid"]["accuracy"][-1] == pytest.approx(
            float((model(x).argmax(1) == y).double().mean())
        )


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, training: Any) -> None:
        self.seen.append(training.optimizer.param_groups[0]["lr"])


def test_an_epoch_scheduler_steps_once_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(num_epochs=4)
    given["scheduler"] = lr_scheduler.MultiStepLR(given["optimizer"], [1, 3], gamma=0.1)
    history = SupervisedRunner(device="cpu").train(**given)
    assert history["lr"] == pytest.approx([0.02, 0.002, 0.002, 0.0002])
    assert "MultiStepLR steps once an epoch" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["known", "asked"])
def test_a_step_scheduler_steps_once_an_optimizer_step(form: str) -> None:
    rates = Rates()
    given = arguments(num_epochs=1, callbacks=[rates], accumulate=2)
    if form == "known":
        given["scheduler"] = lr_scheduler.OneCycleLR(given["optimizer"], max_lr=0.1, total_steps=8)
        expected = _one_cycle(8)
    else:
        given["scheduler"] = (
            lr_scheduler.LambdaLR(given["optimizer"], lambda step: 1 / (1 + step)),
            "step",
        )
        expected = [0.02 / (1 + step) for step in range(1, 5)]
    SupervisedRunner(device="cpu").train(**given)
    assert len(rates.seen) == 4, "53 samples, batch 8 x 2 accumulated"
    assert rates.seen == pytest.approx(expected[:4])


def _one_cycle(steps: int) -> list[float]:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=0.02)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    rates = []
    for _ in range(steps - 1):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_any_object_with_step_is_a_scheduler() -> None:
    class Own:
        calls = 0

        def step(self) -> None:
            self.calls += 1

    own = Own()
    fit(scheduler=own, num_epochs=3)
    assert own.calls == 3


def test_reduce_on_plateau_sees_the_main_metric() -> None:
    given = arguments(num_epochs=4, main_metric="accuracy", minimize_metric=False)
    schedule = lr_scheduler.ReduceLROnPlateau(
        given["optimizer"], mode="min", patience=0, threshold=0.0
    )
    given["scheduler"] = schedule
    history = SupervisedRunner(device="cpu").train(**given)
    assert schedule.best == min(history["valid"]["accuracy"])


def test_early_stopping_ends_after_its_patience() -> None:
    _, history = fit(
        num_epochs=30,
        callbacks=[EarlyStopping(2, metric="accuracy", minimize=False, min_delta=1.0)],
    )
    assert history["epoch"] == [1, 2, 3]


class Recorder(Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_start(self, training: Any) -> None:
        self.calls.append("train_start")

    def on_epoch_start(self, training: Any) -> None:
        self.calls.append("epoch_start")

    def on_epoch_end(self, training: Any) -> None:
        self.calls.append(f"epoch_end {training.epoch}")

    def on_train_end(self, training: Any) -> None:
        self.calls.append("train_end")


def test_callbacks_are_called_in_order() -> None:
    recorder = Recorder()
    fit(num_epochs=2, callbacks=[recorder])
    assert recorder.calls == [
        "train_start",
        "epoch_start",
        "epoch_end 1",
        "epoch_start",
        "epoch_end 2",
        "train_end",
    ]


def test_files_under_the_logdir(tmp_path: Path) -> None:
    _, history = fit(logdir=tmp_path, num_epochs=3)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert [float(row["valid_loss"]) for row in rows] == history["valid"]["loss"]
    assert list((tmp_path / "tensorboard").glob("events.*"))
    manifest = json.loads((tmp_path / "checkpoints" / "last" / "manifest.json").read_text())
    assert manifest["metrics"]["valid"]["loss"] == history["valid"]["loss"][-1]


def test_best_is_the_best_epochs_weights_not_the_last(tmp_path: Path) -> None:
    # The first epoch's loss is the largest.
    model, history = fit(logdir=tmp_path, num_epochs=4, minimize_metric=False)
    assert max(history["valid"]["loss"]) == history["valid"]["loss"][0]
    state = allhands.load_checkpoint(tmp_path / "checkpoints" / "best")
    assert state["epoch"] == 1
    assert not torch.equal(state["model"]["0.weight"], model[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("with_logdir", [False, True])
def test_load_best_on_end(tmp_path: Path, with_logdir: bool) -> None:
    model, history = fit(
        num_epochs=4,
        load_best_on_end=True,
        minimize_metric=False,
        logdir=tmp_path if with_logdir else None,
    )
    values = SupervisedRunner(device="cpu").evaluate(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        loaders={"valid": DataLoader(classification(), 8)},
    )
    assert values["valid"]["loss"] == pytest.approx(history["valid"]["loss"][0])


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, stop_after: int) -> None:
    def run(logdir: Path, epochs: int, resume: Any = None) -> tuple[nn.Module, Any, Any]:
        given = arguments(dropout=0.3, logdir=logdir, num_epochs=epochs, resume=resume)
        given["scheduler"] = lr_scheduler.MultiStepLR(given["optimizer"], [2, 4])
        given["callbacks"] = [EarlyStopping(10)]
        history = SupervisedRunner(device="cpu").train(**given)
        return given["model"], history, given["callbacks"][0].best

    whole, expected, best = run(tmp_path / "whole", 5)
    run(tmp_path / "cut", stop_after)
    resumed, history, best_resumed = run(tmp_path / "cut", 5, "auto")
    assert same(whole, resumed)
    assert best == best_resumed
    assert {**history, "seconds": 0} == {**expected, "seconds": 0}
    rows = list(csv.DictReader((tmp_path / "cut" / "metrics.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4", "5"]


def test_resume_auto_starts_anew_in_an_empty_logdir(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, history = fit(logdir=tmp_path, resume="auto", num_epochs=1)
    assert history["epoch"] == [1]
    assert "starting anew" in capsys.readouterr().out


class Worsen(Callback):
    def on_epoch_start(self, training: Any) -> None:
        training.optimizer.param_groups[0]["lr"] = 5.0


def test_best_so_far_survives_a_resume(tmp_path: Path) -> None:
    fit(logdir=tmp_path, num_epochs=3, callbacks=[Callback()])
    _, history = fit(logdir=tmp_path, num_epochs=4, resume="auto", callbacks=[Worsen()])
    losses = history["valid"]["loss"]
    assert losses[3] > losses[2] == min(losses)
    manifest = json.loads((tmp_path / "checkpoints" / "best" / "manifest.json").read_text())
    assert manifest["epoch"] == 3


def test_an_earlier_run_in_the_logdir_is_kept(tmp_path: Path) -> None:
    fit(logdir=tmp_path, num_epochs=2)
    fit(logdir=tmp_path, num_epochs=1)
    kept = json.loads(
        (tmp_path / "earlier-1" / "checkpoints" / "last" / "manifest.json").read_text()
    )
    new = json.loads((tmp_path / "checkpoints" / "last" / "manifest.json").read_text())
    assert (kept["epoch"], new["epoch"]) == (2, 1)


def test_the_users_generators_are_left_as_they_were() -> None:
    def draws() -> tuple[Any, ...]:
        return torch.rand(2).tolist(), np.random.rand(), random.random()

    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = draws()
    given = arguments(dropout=0.5)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    SupervisedRunner(device="cpu").train(**given)
    assert draws() == expected


def test_the_same_seed_repeats_and_another_does_not() -> None:
    first, second, third = (fit(dropout=0.5, seed=seed)[0] for seed in (1, 1, 2))
    assert same(first, second)
    assert not same(first, third)


def test_check_and_overfit_are_short() -> None:
    _, history = fit(check=True, num_epochs=50)
    assert (history["epoch"], history["step"]) == ([1, 2, 3], [3, 6, 9])
    _, history = fit(overfit=True, num_epochs=4)
    assert history["step"] == [1, 2, 3, 4]


def test_dict_batches_and_several_inputs() -> None:
    class Pairs(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            return {"image": torch.full((2,), float(index)), "label": torch.tensor([float(index)])}

    model = nn.Linear(2, 1)
    history = SupervisedRunner(device="cpu", input_key="image", target_key="label").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        num_epochs=2,
        loaders={"train": DataLoader(Pairs(), 4)},
    )
    assert history["train"]["loss"][1] < history["train"]["loss"][0]

    both = nn.Bilinear(2, 2, 1)
    x = torch.rand(8, 2)
    SupervisedRunner(device="cpu").train(
        model=both,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(both.parameters(), lr=0.1),
        loaders={"train": DataLoader(TensorDataset(x, x, x[:, :1]), 4)},
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains(precision: str) -> None:
    model, history = fit(precision=precision, num_epochs=5)
    assert history["valid"]["loss"][-1] < history["valid"]["loss"][0]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_bar_and_table_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    fit(verbose=True, num_epochs=2)
    out = capsys.readouterr().out
    assert "train accuracy" in out
    assert "2/2" in out


def test_a_model_used_before_keeps_its_optimizer_state() -> None:
    given = arguments(num_epochs=1)
    runner = SupervisedRunner(device="cpu")
    runner.train(**given)
    runner.train(**given)
    assert int(next(iter(given["optimizer"].state.values()))["step"]) == 14
    assert runner.model is given["model"]
    assert classifier() is not runner.model


def test_ignored_targets_of_one_loader_do_not_disturb_another() -> None:
    x, y = classification().tensors
    ignored = y.clone()
    ignored[:20] = -100
    loaders = {
        "train": DataLoader(TensorDataset(x, y), 8, shuffle=True),
        "valid": DataLoader(TensorDataset(x, ignored), 8),
    }
    model, history = fit(loaders=loaders, metrics=None, num_epochs=1)
    with torch.no_grad():
        assert history["valid"]["loss"][0] == pytest.approx(
            float(nn.functional.cross_entropy(model(x), ignored)), rel=1e-6
        )


def test_a_target_that_comes_first_is_counted_where_the_runner_finds_it() -> None:
    class Backwards(SupervisedRunner):
        def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
            return model(batch[1]), batch[0]

        def target_of(self, batch: Any) -> Any:
            return batch[0]

    x, y = classification().tensors
    ignored = y.clone()
    ignored[::2] = -100
    model = classifier()
    values = Backwards(device="cpu").evaluate(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        loaders={"valid": DataLoader(TensorDataset(ignored, x), 8)},
    )
    with torch.no_grad():
        assert values["valid"]["loss"] == pytest.approx(
            float(nn.functional.cross_entropy(model(x), ignored)), rel=1e-6
        )


def test_a_runner_may_use_another_device_later() -> None:
    fit(num_epochs=1)
    given = arguments(num_epochs=1)
    SupervisedRunner().train(**given)
    assert next(given["model"].parameters()).device.type == "cpu"
