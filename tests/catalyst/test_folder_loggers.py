"""Catalyst's loggers write the history into folders of their own."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import UserError
from allhands.catalyst import dl


def train(loggers: Any, **given: Any) -> Any:
    x = torch.rand(24, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.argmax(1)), batch_size=8)
    model = nn.Linear(4, 4)
    return dl.SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": loader, "valid": loader},
        num_epochs=3,
        callbacks=[dl.AccuracyCallback()],
        loggers=loggers,
        **given,
    )


@pytest.mark.parametrize(
    "given", [{}, pytest.param({"ddp": True, "workers": 2}, marks=pytest.mark.serial)]
)
def test_files_of_a_training(given: Any, tmp_path: Path, preloaded: None) -> None:
    history = train(
        {
            "console": dl.ConsoleLogger(),
            "csv": dl.CSVLogger(tmp_path / "numbers"),
            "tb": dl.TensorboardLogger(str(tmp_path / "tb"), use_logdir_postfix=True),
        },
        **given,
    )
    with (tmp_path / "numbers" / "valid.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    for name in ("loss", "accuracy01"):
        assert [float(row[name]) for row in rows] == history["valid"][name]
    events = EventAccumulator(str(tmp_path / "tb" / "tensorboard_logger")).Reload()
    # It reads files by their names, which are not in the order of time within a second.
    shown = sorted(events.Scalars("train/accuracy"), key=lambda event: event.step)
    assert [event.step for event in shown] == [1, 2, 3]
    assert [event.value for event in shown] == pytest.approx(history["train"]["accuracy"])


def test_what_is_no_logger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"write dl.CSVLogger\(logdir\)"):
        train([print])
    with pytest.raises(UserError, match=r"TensorboardLogger\(log_batch_metrics"):
        dl.TensorboardLogger(tmp_path, log_batch_metrics=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        train([dl.CSVLogger(tmp_path / "file")])
