"""Weights that a callback swaps in around the evaluation of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from allhands import FSDP, Callback, LocalSGD
from allhands.errors import UserError
from allhands.federated import Federated
from tests.runner.problems import fit


class Averaged(Callback):
    """Evaluates a moving average of the weights, and trains on."""

    def on_train_start(self, training: Any) -> None:
        self.average = {name: p.detach().clone() for name, p in training.model.named_parameters()}

    def on_step_end(self, training: Any) -> None:
        for name, parameter in training.model.named_parameters():
            self.average[name].mul_(0.5).add_(parameter.detach(), alpha=0.5)

    def on_evaluate_start(self, training: Any) -> None:
        self.own = {name: p.detach().clone() for name, p in training.model.named_parameters()}
        for name, parameter in training.model.named_parameters():
            parameter.data.copy_(self.average[name])

    def on_evaluate_end(self, training: Any) -> None:
        for name, parameter in training.model.named_parameters():
            parameter.data.copy_(self.own[name])


def test_the_average_is_evaluated_and_the_training_goes_on_with_its_own(tmp_path: Path) -> None:
    plain, without = fit()
    model, history = fit(callbacks=[Averaged()], logdir=tmp_path)
    assert history["train"] == without["train"]
    assert history["valid"]["loss"] != without["valid"]["loss"]
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.serial
@pytest.mark.parametrize(
    "strategy", ["ddp", FSDP(), LocalSGD(every=3)], ids=lambda one: getattr(one, "name", one)
)
def test_it_is_the_same_on_workers(strategy: Any, preloaded: None) -> None:
    own, without = fit(distributed=strategy, workers=2)
    model, history = fit(distributed=strategy, workers=2, callbacks=[Averaged()])
    assert history["train"]["loss"] == without["train"]["loss"]
    for value, expected in zip(model.parameters(), own.parameters(), strict=True):
        assert torch.equal(value, expected)
    if strategy != "ddp":
        assert history["valid"]["loss"] != without["valid"]["loss"]
        return
    alone = fit(callbacks=[Averaged()], loaders=doubled())[1]
    assert history["valid"]["loss"] == pytest.approx(alone["valid"]["loss"], abs=1e-5)


def doubled() -> dict[str, Any]:
    """What one process loads in a step where two workers load 8 samples each."""
    from torch.utils.data import DataLoader

    from tests.runner.problems import classification

    data = classification()
    return {"train": DataLoader(data, 16, shuffle=True), "valid": DataLoader(data, 16)}


class Looks(Callback):
    def on_evaluate_end(self, training: Any) -> None:
        """What it does is never reached."""


def test_federated_training_refuses_what_it_does_not_call() -> None:
    with pytest.raises(
        UserError, match="Looks.on_evaluate_end is never called in federated training"
    ):
        fit(callbacks=[Looks()], distributed=Federated(clients=2), num_epochs=1)
