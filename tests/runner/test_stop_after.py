"""A training whose time is over ends after the same step on every rank."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Callback, StopAfter, SupervisedRunner, UserError
from tests.worlds import in_world


class Count(Callback):
    step = 0

    def on_step_end(self, training: Any) -> None:
        self.step = training.step


def train(logdir: Path | None, *callbacks: Callback, epochs: int = 10**6) -> int:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    count = Count()
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={
            "train": DataLoader(TensorDataset(torch.randn(60, 4), torch.randint(2, (60,))), 4)
        },
        num_epochs=epochs,
        callbacks=[count, *callbacks],
        logdir=logdir,
        resume="auto" if logdir is not None else None,
    )
    return count.step


def test_it_ends_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(tmp_path, StopAfter(seconds=0.3))
    assert first > 0
    said = capsys.readouterr().out
    assert re.search(r"stopped after (optimizer step|epoch) \d+.*: its time is over", said)
    assert train(tmp_path, StopAfter(seconds=0.3)) > first


def test_a_time_that_is_not_over_changes_nothing() -> None:
    assert train(None, StopAfter(1), epochs=2) == train(None, epochs=2) == 30


def on_workers() -> int:
    return train(None, StopAfter(seconds=0.5))


def test_all_ranks_end_after_the_same_step() -> None:
    one, other = in_world(2, on_workers)
    assert one == other > 0


@pytest.mark.parametrize("given", [0, -1, "1h", timedelta(0)])
def test_what_is_no_time_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match=r"StopAfter\(hours=11\.5\)"):
        StopAfter(given)
    assert StopAfter(timedelta(minutes=3)).seconds == StopAfter(minutes=3).seconds == 180
