"""Optimizers whose weights in training are not those of evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from allhands import Callback
from tests.conformance.optimizers import ScheduleFree
from tests.runner.problems import StopAt, classifier, fit


class Seen(Callback):
    """The mode after each step, in each evaluation, and the weights then."""

    def __init__(self) -> None:
        self.steps: set[bool] = set()
        self.evaluated: list[bool] = []

    def on_step_end(self, training: Any) -> None:
        self.steps.add(training.optimizer.param_groups[0]["train_mode"])

    def on_evaluate_start(self, training: Any) -> None:
        self.evaluated.append(training.optimizer.param_groups[0]["train_mode"])


def trained(**options: Any) -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
    model = classifier()
    optimizer = ScheduleFree(model.parameters(), lr=0.5)
    fit(model=model, optimizer=optimizer, **options)
    return model.state_dict(), optimizer


def test_the_mode_is_that_of_what_is_done() -> None:
    seen = Seen()
    _, optimizer = trained(callbacks=[seen])
    assert seen.steps == {True}
    assert seen.evaluated == [False] * 3
    assert optimizer.param_groups[0]["train_mode"] is False


def test_a_resumed_training_goes_on_with_the_training_weights(tmp_path: Path) -> None:
    through, _ = trained(logdir=tmp_path / "through", callbacks=[Callback()])
    trained(logdir=tmp_path / "again", callbacks=[StopAt(10)])
    again, _ = trained(logdir=tmp_path / "again", callbacks=[Callback()], resume="auto")
    assert all(torch.equal(through[name], again[name]) for name in through)
