from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner, UserError
from allhands.runner.metrics import named_metrics
from tests.worlds import in_world


class Echo(nn.Module):
    """Gives back its input, so that metrics can be worked out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.double().mean()


def measure(values: list[float], batch: int) -> dict[str, float]:
    """The mean of the values and torchmetrics' view of them, over a loader."""
    import torchmetrics

    x = torch.tensor(values)
    metrics = {
        "mean": lambda output, target: output.mean(),
        "max": torchmetrics.MaxMetric(),
        "mse": torchmetrics.MeanSquaredError(),
    }
    del metrics["max"]  # takes one argument; see the F1 below for states that are no sums
    return SupervisedRunner(device="cpu").evaluate(
        model=Echo(),
        criterion=mean_loss,
        loaders={"valid": DataLoader(TensorDataset(x, torch.zeros_like(x)), batch)},
        metrics=metrics,
        distributed=torch.distributed.is_initialized(),
    )["valid"]


def measure_many() -> list[dict[str, float]]:
    return [measure([1.0, 2.0, 3.0, 4.0, 5.0], 2), measure([1.0, 2.0, 10.0], 1), measure([7.0], 4)]


@pytest.mark.serial
# rare on 2: 3 have what 2 have.
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.rare), 3])
def test_every_sample_counts_once(workers: int) -> None:
    expected = [3.0, 13 / 3, 7.0]
    squares = [11.0, 35.0, 49.0]
    for found in in_world(workers, measure_many, preload=("torchmetrics",)):
        for values, mean, square in zip(found, expected, squares, strict=True):
            assert values["loss"] == pytest.approx(mean)
            assert values["mean"] == pytest.approx(mean)
            assert values["mse"] == pytest.approx(square)


def rank_metrics() -> list[float]:
    """F1 and AUC over 21 samples: not means of anything over batches."""
    from torchmetrics.classification import BinaryAUROC, BinaryF1Score

    generator = torch.Generator().manual_seed(4)
    x, y = torch.rand(21, generator=generator), torch.randint(0, 2, (21,), generator=generator)
    y[:4] = 0  # a batch without positives
    values = SupervisedRunner(device="cpu").evaluate(
        model=Echo(),
        criterion=mean_loss,
        loaders={"valid": DataLoader(TensorDataset(x, y), 4)},
        metrics={"f1": BinaryF1Score(), "auc": BinaryAUROC()},
        distributed=torch.distributed.is_initialized(),
    )["valid"]
    f1, auc = BinaryF1Score(sync_on_compute=False), BinaryAUROC(sync_on_compute=False)
    return [values["f1"], float(f1(x, y)), values["auc"], float(auc(x, y))]


@pytest.mark.serial
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.rare), 3])
def test_states_are_accumulated_not_averaged(workers: int) -> None:
    for f1, expected_f1, auc, expected_auc in in_world(
        workers, rank_metrics, preload=("torchmetrics",)
    ):
        assert f1 == pytest.approx(expected_f1)
        assert auc == pytest.approx(expected_auc)


BAD: list[tuple[Any, str]] = [
    (["accuracy", "accuracy"], "two metrics are named 'accuracy'.*accuracy_1"),
    (["acuracy"], r"metric 'acuracy'; did you mean 'accuracy'\? Known are: accuracy"),
    ({"loss": lambda o, t: o.mean()}, "cannot be named 'loss'"),
    ([lambda o, t: o.mean()], "a lambda has no name"),
    ({"x": 3}, "metric 'x' is a int"),
]


@pytest.mark.parametrize(("metrics", "message"), BAD)
def test_bad_metrics_are_refused_by_name(metrics: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        named_metrics(metrics)


def test_a_metric_that_gives_a_vector_is_refused() -> None:
    with pytest.raises(UserError, match=r"metric 'rows' returned shape \[3\]"):
        x = torch.ones(3)
        SupervisedRunner(device="cpu").evaluate(
            model=Echo(),
            criterion=mean_loss,
            loaders={"valid": DataLoader(TensorDataset(x, x), 4)},
            metrics={"rows": lambda output, target: output},
        )
