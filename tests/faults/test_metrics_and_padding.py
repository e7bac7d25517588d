"""Measured twice, or not at all: padding, lost tails, means of means, ranks without a sample.

Kinds of fault: pytorch/pytorch#25162 and Lightning-AI/pytorch-lightning#2398 (padding),
huggingface/accelerate#575 and #2007 (the
cut tail), Lightning-AI/pytorch-lightning#21838 (integer counters), #4493 (means of F1). Means over
5 and 3 samples, F1 and AUC over 21 are in tests/runner/test_metrics.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, MulticlassAUROC

from allhands import SupervisedRunner
from tests.faults.probes import Found, probe, size, train
from tests.reference import Slope
from tests.refusals import refused
from tests.runner.test_metrics import Echo, mean_loss

pytestmark = pytest.mark.serial


class Tally(torchmetrics.Metric):
    """The mean target, kept as two integers."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.total += target.sum()
        self.count += len(target)

    def compute(self) -> torch.Tensor:
        return self.total.double() / self.count


def evaluate(
    tensors: tuple[torch.Tensor, ...], batch: int, metrics: Any = None, **options: Any
) -> dict[str, float]:
    loader = DataLoader(TensorDataset(*tensors), batch, **options)
    return SupervisedRunner(device="cpu").evaluate(
        model=Echo(), criterion=mean_loss, loaders={"valid": loader}, metrics=metrics
    )["valid"]


SIZES = [(n, batch) for n in (1, 2, 8, 9, 10, 21) for batch in (2, 5)]


@probe
def predictions() -> dict[str, list[float]]:
    """One row a sample, for sizes that divide evenly and that do not."""
    rows = {}
    for n, batch in SIZES:
        x = torch.arange(float(n))
        given = SupervisedRunner(device="cpu").predict(
            model=Echo(), loader=DataLoader(TensorDataset(x, x), batch)
        )
        rows[f"{n}/{batch}"] = given.tolist()
    return rows


@pytest.mark.parametrize(("n", "batch"), SIZES)
def test_every_sample_is_predicted_once(found: Found, n: int, batch: int) -> None:
    for rows in found(predictions):
        assert rows[f"{n}/{batch}"] == list(map(float, range(n)))


@probe
def evaluations() -> dict[str, dict[str, float]]:
    """The mean of 1, 2, …, n and of its integer copy; with drop_last, of the global batches that
    are full."""
    values = {}
    for n, batch in SIZES:
        x = torch.arange(1, n + 1)
        for drop in (False, True):
            if not drop or n >= batch * size():
                values[f"{n}/{batch}/{drop}"] = evaluate(
                    (x.float(), x), batch, {"tally": Tally()}, drop_last=drop
                )
    return values


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("n", "batch"), SIZES)
def test_every_sample_is_measured_once_and_drop_last_drops_only_a_short_global_batch(
    found: Found, n: int, batch: int, drop: bool
) -> None:
    full = batch * found.workers
    measured = n // full * full if drop else n
    for values in found(evaluations):
        if measured == 0:
            assert f"{n}/{batch}/{drop}" not in values
            continue
        result = values[f"{n}/{batch}/{drop}"]
        assert result["loss"] == pytest.approx((measured + 1) / 2)
        assert result["tally"] == (measured + 1) / 2


@probe
def fewer_than_workers() -> dict[str, list[float]]:
    """Metrics that keep all outputs, on 2 and 3 samples: a rank has none of them."""
    values = {}
    generator = torch.Generator().manual_seed(3)
    for n in (2, 3):
        one, three, y = (
            torch.rand(n, generator=generator),
            torch.rand(n, 3, generator=generator).softmax(1),
            torch.arange(n) % 3,
        )
        for name, outputs, target, metric in (
            ("binary", one, y % 2, BinaryAUROC),
            ("classes", three, y, lambda **o: MulticlassAUROC(3, **o)),
        ):
            measured = evaluate((outputs, target), 4, {"auc": metric()})["auc"]
            values[f"{name}/{n}"] = [
                measured,
                float(metric(sync_on_compute=False)(outputs, target)),
            ]
    return values


def test_a_metric_that_keeps_outputs_bears_ranks_without_a_sample(found: Found) -> None:
    for values in found(fewer_than_workers):
        for measured, whole in values.values():
            assert measured == pytest.approx(whole)


@probe
def f1() -> list[float]:
    """Two batches of 4, the second without positives: the mean of the batches' F1 would be another
    number."""
    x, y = (
        torch.tensor([0.9, 0.8, 0.2, 0.7, 0.6, 0.1, 0.2, 0.3]),
        torch.tensor([1, 1, 1, 0, 0, 0, 0, 0]),
    )
    loaders = {"train": DataLoader(TensorDataset(x, y), 1)}
    model = Slope()
    torch.nn.init.ones_(model.w)
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=mean_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loaders=loaders,
        metrics={"f1": BinaryF1Score()},
        accumulate=4,
    )
    return [evaluate((x, y), 4, {"f1": BinaryF1Score()})["f1"], history["train"]["f1"][0]]


def test_f1_is_that_of_all_samples(found: Found) -> None:
    # 2 true positives, 2 false ones, 1 false negative
    assert found(f1) == [pytest.approx([4 / 7, 4 / 7])] * found.workers


@probe
def training_metrics() -> dict[str, list[float]]:
    """Uneven shares in training: 7 samples, and the mean of their targets."""
    x = torch.arange(1, 8)
    history = train(
        Slope(),
        (x.float(), x),
        2,
        lr=0.0,
        metrics={"tally": Tally(), "mean": lambda output, target: target.double().mean()},
    )
    return {name: history["train"][name] for name in ("tally", "mean")}


def test_training_metrics_are_over_all_samples(found: Found) -> None:
    assert (
        found(training_metrics) == [{"tally": [4.0], "mean": pytest.approx([4.0])}] * found.workers
    )


@probe
def own_synchronisation() -> str:
    x = torch.ones(4)
    return refused(
        lambda: evaluate((x, x), 1, {"mse": torchmetrics.MeanSquaredError(sync_on_compute=False)})
    )


def test_a_metric_that_would_report_one_ranks_samples_is_refused(found: Found) -> None:
    for message in found(own_synchronisation):
        assert ("metric 'mse' was made with sync_on_compute=False" in message) == (
            found.workers > 1
        )


@probe
def no_batch_at_all() -> list[str]:
    x = torch.ones(1)
    short = DataLoader(TensorDataset(x, x), 2, drop_last=True)
    model = Slope()
    return [
        refused(lambda: evaluate((x, x), 2, drop_last=True)),
        refused(
            lambda: SupervisedRunner(device="cpu").train(
                model=model,
                criterion=mean_loss,
                optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
                loaders={"train": short},
            )
        ),
    ]


def test_a_loader_that_gives_nothing_is_an_error_and_not_a_nan(found: Found) -> None:
    for evaluating, training in found(no_batch_at_all):
        assert "no batch to evaluate (valid)" in evaluating
        assert "no batch to train on (epoch 1)" in training
        assert "drop_last=False" in training
