"""What runners with a ``handle_batch`` refuse, and what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from allhands import UserError
from allhands.catalyst import dl
from tests.catalyst.small_training import (
    CLASSES,
    Classifier,
    MultiHead,
    OfOneBatch,
    Trace,
    TwoHeads,
    loaders,
    net,
)


class Forgets(Classifier):
    def handle_batch(self, batch: Any) -> None:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        if self.is_train_loader:
            self.engine.backward(loss)
            self.optimizer.step()


class Raw(Classifier):
    def handle_batch(self, batch: Any) -> None:
        F.cross_entropy(self.model(batch[0]), batch[1]).backward()


class Early(Classifier):
    def handle_batch(self, batch: Any) -> None:
        self.optimizer.step()


class Misspelt(Classifier):
    def on_loader_begin(self, runner: Any) -> None:
        pass


class WrongArguments(Classifier):
    def on_loader_end(self) -> None:  # type: ignore[override]
        pass


class MisspeltHook(dl.Callback):
    def on_batch_begin(self, runner: Any) -> None:
        pass


def train(runner: Any, **given: Any) -> Any:
    model = net(6, CLASSES, 1)
    objects = {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loaders": {"train": loaders(1)["train"]},
    }
    return runner.train(**objects | given)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (dl.Runner, {}, r"Runner has no step; write def handle_batch\(self, batch\)"),
        (Forgets, {}, r"without optimizer.zero_grad\(\)"),
        (Raw, {}, r"loss.backward\(\) was called outside .*write self.engine.backward\(loss\)"),
        (Early, {}, r"optimizer.step\(\) before engine.backward\(loss\)"),
        (Misspelt, {}, "on_loader_begin"),
        (WrongArguments, {}, r"write def on_loader_end\(self, runner\)"),
        (Classifier, {"callbacks": [MisspeltHook()]}, "MisspeltHook.on_batch_begin looks like"),
        (Classifier, {"evaluate_every": 2}, "evaluate_every with Classifier"),
        (Classifier, {"distributed": "kvstore"}, "engine.backward with strategy 'kvstore'"),
        (
            MultiHead,
            {"model": TwoHeads(), "callbacks": [dl.CriterionCallback("logits3", "targets1")]},
            "optimizer",
        ),
        (
            Classifier,
            {"callbacks": [dl.CriterionCallback("logits", "targets")]},
            r"CriterionCallback looks up 'logits', and the batch is a tuple",
        ),
        (
            Classifier,
            {"callbacks": [dl.OptimizerCallback(optimizer_key="x")]},
            r"OptimizerCallback\(optimizer_key='x'\): there is one optimizer",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(kind: Any, given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        train(kind(device="cpu"), **given)


class Overlap(nn.Module):
    """A ratio of sums over the batch, as losses of segmentation are."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        chosen = output.softmax(1)[torch.arange(len(target)), target]
        return 1 - chosen.sum() / (output.softmax(1).square().sum() + 1)


def test_a_criterion_that_is_no_mean_is_named_where_batches_are_divided() -> None:
    given = {"criterion": Overlap(), "callbacks": [dl.AccuracyCallback("logits", "targets")]}
    train(OfOneBatch(device="cpu"), **given)
    with pytest.raises(UserError, match="Overlap"):
        train(OfOneBatch(device="cpu"), accumulate=2, **given)


class OnEachRank(Classifier):
    def on_loader_end(self, runner: Any) -> None:
        self.loader_metrics["own"] = float(self.batch_size + 10 * self.engine.process_index)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (OnEachRank, {}, r"loader_metrics\['own'\] is .*set batch_metrics\['own'\]"),
        (
            OfOneBatch,
            {"criterion": nn.CrossEntropyLoss(weight=torch.ones(CLASSES) / 2)},
            "a mean over the samples, and CrossEntropyLoss sums, weighs or leaves out",
        ),
    ],
)
def test_what_is_no_mean_of_all_workers_is_named(
    kind: Any, given: Any, said: str, preloaded: None
) -> None:
    with pytest.raises(Exception, match=said):
        train(kind(device="cpu"), ddp=True, workers=2, **given)


def test_hooks_for_another_runner_are_refused() -> None:
    from allhands import SupervisedRunner

    with pytest.raises(UserError, match=r"Trace is a Callback of allhands.catalyst"):
        train(SupervisedRunner(device="cpu"), callbacks=[Trace()])
