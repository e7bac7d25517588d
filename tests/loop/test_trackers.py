"""Trackers get what metrics.csv has, from rank 0 alone, and never end a training."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import Federated, Logger, MLflowLogger, SupervisedRunner, UserError, WandbLogger
from allhands.errors import WorldError
from tests.patience import patience
from tests.worlds import in_world


class Keep(Logger):
    """Writes down what it is told."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def _write(self, *what: Any) -> None:
        with self.file.open("a") as file:
            print(*what, file=file)

    def open(self, about: Mapping[str, Any], logdir: Path | None, resumed: bool) -> None:
        self._write("open", about["optimizer"], about["lr"], about["workers"], resumed)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if "epoch" in values:
            self._write("log", step, sorted(values))

    def picture(self, name: str, file: Path) -> None:
        self._write("picture", name, file.name)

    def close(self, failed: bool) -> None:
        self._write("close", failed)


def train(loggers: Any, logdir: Path | None = None, epochs: int | None = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x, y = torch.randn(24, 4), torch.randint(2, (24,))
    data = TensorDataset(x, y)
    return SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(data, 8), "valid": DataLoader(data, 8)},
        num_epochs=epochs,
        loggers=loggers,
        logdir=logdir,
        **options,
    )


NAMES = ["epoch", "lr", "train/loss", "valid/loss"]


def test_an_own_one_is_told_all_by_rank_0_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLHANDS_CURVES", "1")
    file = tmp_path / "told"
    in_world(2, train, Keep(file), tmp_path / "logs")
    assert file.read_text().splitlines() == [
        "open SGD 0.1 2 False",
        f"log 2 {NAMES}",
        f"log 4 {NAMES}",
        "picture curves curves.png",
        "close False",
    ]
    train([Keep(file)], tmp_path / "logs", 3, resume="auto")
    assert file.read_text().splitlines()[5] == "open SGD 0.1 1 True"


def test_own_loops_have_them_too(tmp_path: Path) -> None:
    file = tmp_path / "told"
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(24, 4), torch.randint(2, (24,)))
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(data, 8)},
        device="cpu",
        loggers=Keep(file),
    )
    for epoch in loop.epochs(2):
        for batch in epoch.train:
            loop.step(lambda one: nn.functional.cross_entropy(model(one[0]), one[1]), batch)
    assert [line.split()[0] for line in file.read_text().splitlines()] == [
        "open",
        "log",
        "log",
        "close",
    ]


def test_federated_rounds_have_them_too(tmp_path: Path) -> None:
    file = tmp_path / "told"
    train(Keep(file), distributed=Federated(rounds=2, clients=4, per_round=2), epochs=None)
    words = [line.split()[:2] for line in file.read_text().splitlines()]
    assert words == [["open", "SGD"], ["log", "1"], ["log", "2"], ["close", "False"]]


class Broken(Logger):
    def log(self, values: Mapping[str, float], step: int) -> None:
        raise ConnectionError("no route to the tracker")


class Fails(allhands.Callback):
    def on_epoch_end(self, training: Any) -> None:
        raise WorldError("on purpose")


def test_one_that_fails_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "told"
    history = train([Broken(), Keep(file)])
    assert len(history["epoch"]) == 2
    said = capsys.readouterr().out
    assert said.count("note: Broken failed and gets no more numbers") == 1
    assert "ConnectionError: no route to the tracker" in said
    assert file.read_text().splitlines()[-1] == "close False"
    with pytest.raises(WorldError):
        train(Keep(file), callbacks=Fails())
    assert file.read_text().splitlines()[-1] == "close True"


def test_what_is_no_logger_is_refused() -> None:
    for given, message in (
        ("wandb", "loggers holds"),
        ([Keep], "loggers holds the class Keep"),
        (3, r"allhands.WandbLogger\(project="),
    ):
        with pytest.raises(UserError, match=message):
            train(given)


def test_mlflow_has_the_numbers_and_a_resumed_training_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # where pictures go
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    history = train(MLflowLogger("digits", uri, name="first"), tmp_path / "logs")
    history = train(MLflowLogger("digits", uri), tmp_path / "logs", 3, resume="auto")
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer"] == "SGD"
    values = [
        one.value
        for one in sorted(
            client.get_metric_history(run.info.run_id, "valid/loss"), key=lambda one: one.step
        )
    ]
    assert values == pytest.approx(history["valid"]["loss"])


def test_wandb_has_the_numbers_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logdir = tmp_path / "logs"
    history = train(WandbLogger("digits", mode="offline"), logdir)
    assert told(logdir, 2) == pytest.approx(sorted(history["valid"]["loss"]))
    history = train(WandbLogger("digits", mode="offline"), logdir, 3, resume="auto")
    assert told(logdir, 3) == pytest.approx(sorted(history["valid"]["loss"]))
    assert len({part["id"] for part in offline_runs(logdir)}) == 1


def told(logdir: Path, count: int) -> list[float]:
    """The numbers, once so many are there: wandb's own process may still write as a run ends."""
    over = time.monotonic() + patience(30)
    values: list[float] = []
    while len(values) < count and time.monotonic() < over:
        values = sorted(value for part in offline_runs(logdir) for value in part["valid/loss"])
        time.sleep(0.1)
    return values


def offline_runs(logdir: Path) -> list[dict[str, Any]]:
    """What wandb has written for each part of a run."""
    from wandb.proto import wandb_internal_pb2

    runs = []
    for file in sorted(logdir.glob("wandb/offline-run-*/*.wandb")):
        values, run = [], ""
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            run = record.run.run_id or run
            for item in record.history.item:
                if item.key == "valid/loss" or list(item.nested_key) == ["valid/loss"]:
                    values.append(json.loads(item.value_json))
        runs.append({"id": run, "valid/loss": values})
    return runs


def records(content: bytes) -> Iterator[bytes]:
    """Of a log of LevelDB's format, behind 7 bytes of wandb's own: blocks of 32 KiB, and a record's
    parts in them, each behind checksum, length and kind (whole, first, middle, last)."""
    place, record = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""
