"""What a runner of a user's own cannot honour is named."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader

import allhands
from allhands import Runner, UserError
from tests.runner.test_own_runner import GAN, GLOBAL, d_loss_of, data, models, optimizers, train


class NoStep(Runner):
    pass


class OnlyTrains(Runner):
    def train_step(self, loop: Any, batch: Any) -> None:
        loop.step(lambda batch: d_loss_of(loop.models["g"], loop.models["d"], *batch), batch, "d")


class TakesNone(GAN):
    def train_step(self, loop: Any, batch: Any) -> None:
        pass


class Forgets(GAN):
    def valid_step(self, loop: Any, batch: Any) -> Any:
        pass


class Lightning(GAN):
    def training_step(self, batch: Any) -> Any:
        pass


class ByHand(GAN):
    def train_step(self, loop: Any, batch: Any) -> None:
        d_loss_of(loop.models["g"], loop.models["d"], *batch).backward()


class Misspelled(GAN):
    def valid_stp(self, loop: Any, batch: Any) -> Any:
        pass


class FewArguments(GAN):
    def train_step(self, batch: Any) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("runner", "changes", "said"),
    [
        (
            NoStep(),
            {},
            "NoStep has no step of its own; write class Own.allhands.Runner. with train",
        ),
        (
            OnlyTrains(),
            {},
            "loaders has 'valid'.*OnlyTrains has no valid_step; write def valid_step",
        ),
        (TakesNone(), {}, "TakesNone.train_step took no step; call loop.step"),
        (Forgets(), {}, "Forgets.valid_step returned nothing; return a dict of means"),
        (
            Lightning(),
            {},
            "Lightning.training_step is never called; write train_step.self, loop, batch",
        ),
        (ByHand(), {}, "loss.backward.. was called outside of loop.step"),
        (Misspelled(), {}, "Misspelled.valid_stp is never called; did you mean valid_step"),
        (FewArguments(), {}, "write def train_step.self, loop, batch."),
        (GAN(), {"metrics": ["accuracy"]}, "metrics=… with GAN.*return values from valid_step"),
        (
            GAN(),
            {"main_metric": "fid"},
            "main_metric='fid' is not measured; loader 'valid' measures",
        ),
        (GAN(), {"distributed": "federated"}, "distributed='federated'.*its rounds are no steps"),
        (
            GAN(),
            {"scheduler": 3},
            "scheduler is one, and there are the optimizers g, d; pass a dict",
        ),
        (GAN(), {"scheduler": {"x": None}}, "schedulers has 'x', which is no optimizer's name"),
        (GAN(), {"optimizer": None}, "optimizer"),
    ],
)
def test_what_cannot_be_honoured_is_named(runner: Runner, changes: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        train(1, changes.pop("distributed", False), runner=runner, **changes)


def test_an_optimizer_that_no_step_uses_is_named() -> None:
    loaders = {"train": DataLoader(data(), GLOBAL)}
    with pytest.raises(UserError, match="no step used the optimizer 'g' in epoch 1"):
        train(1, runner=OnlyTrains(device="cpu"), loaders=loaders)


def test_evaluate_and_predict_are_the_supervised_runners() -> None:
    for method in ("evaluate", "predict"):
        with pytest.raises(
            UserError, match=rf"GAN.{method}: .*SupervisedRunner\(model=…\).{method}"
        ):
            getattr(GAN(), method)(model=models()["g"])


class Supervised(allhands.SupervisedRunner):
    def train_step(self, loop: Any, batch: Any) -> None:
        pass


class SetUp(allhands.SupervisedRunner):
    def setup(self, loop: Any) -> None:
        pass


def test_a_supervised_runner_has_one_of_each() -> None:
    made = models()
    with pytest.raises(UserError, match=r"optimizer is a dict.*class Own\(allhands.Runner\)"):
        allhands.SupervisedRunner(device="cpu").train(
            model=made["g"],
            criterion=nn.MSELoss(),
            optimizer=optimizers(made),
            loaders={"train": DataLoader(data(), 4)},
        )
    with pytest.raises(UserError, match=r"Supervised.train_step is never called.*allhands.Runner"):
        Supervised(device="cpu").train(model=made["g"], criterion=nn.MSELoss())
    with pytest.raises(UserError, match=r"SetUp.setup is never called.*allhands.Runner"):
        SetUp(device="cpu").train(model=made["g"], criterion=nn.MSELoss())
