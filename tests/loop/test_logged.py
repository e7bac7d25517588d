"""`training.log`: means over an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from allhands import Callback, UserError
from tests.runner.problems import fit


class Logs(Callback):
    def __init__(self, name: str = "step", stop_at: int = 0) -> None:
        self.name, self.stop_at = name, stop_at

    def on_step_end(self, training: Any) -> None:
        training.log(self.name, torch.tensor(float(training.step)), count=training.step)
        training.log("constant", 2.5)
        if training.step == self.stop_at:
            training.stop("half way", now=True)


def test_means_are_weighted_and_start_anew_each_epoch() -> None:
    _, history = fit(callbacks=[Logs()], num_epochs=2)  # 7 steps an epoch

    def mean(steps: range) -> float:
        return sum(step * step for step in steps) / sum(steps)

    assert history["train"]["step"] == pytest.approx([mean(range(1, 8)), mean(range(8, 15))], abs=0)
    assert history["train"]["constant"] == [2.5, 2.5]


def test_sums_survive_a_stop_within_the_epoch(tmp_path: Path) -> None:
    _, whole = fit(callbacks=[Logs()], num_epochs=2)
    fit(callbacks=[Logs(stop_at=10)], num_epochs=2, logdir=tmp_path)
    _, resumed = fit(callbacks=[Logs()], num_epochs=2, logdir=tmp_path, resume="auto")
    assert resumed["train"] == whole["train"]


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"training\.log\('accuracy', …\): 'accuracy' is a metric of this loader already",
    ):
        fit(callbacks=[Logs("accuracy")])


def test_only_numbers_are_logged() -> None:
    class Wrong(Callback):
        def on_step_end(self, training: Any) -> None:
            training.log("x", torch.zeros(3))

    with pytest.raises(
        UserError, match=r"training\.log\('x', …\) got shape \[3\]; it takes one number"
    ):
        fit(callbacks=[Wrong()])
