"""Callbacks of Catalyst's that measure, beside torchmetrics and loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import classification, r2_score, retrieval
from torchmetrics.regression import MeanAbsoluteError

from allhands import UserError
from allhands.catalyst import dl

ROWS, ITEMS = 23, 6


def scores() -> torch.Tensor:
    return torch.rand(ROWS, ITEMS, generator=torch.Generator().manual_seed(3))


def labels() -> torch.Tensor:
    found = (torch.rand(ROWS, ITEMS, generator=torch.Generator().manual_seed(4)) > 0.6).float()
    found[5] = 0.0  # a sample without any
    return found


class Same(nn.Module):
    """Gives its input, and has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.one


def measured(
    callbacks: list[Any], output: torch.Tensor, target: torch.Tensor, **given: Any
) -> dict[str, float]:
    """What callbacks measure on a loader of a training whose steps change nothing."""
    model = Same()
    loader = DataLoader(TensorDataset(output, target), 4)
    history = dl.SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loaders={"train": loader, "valid": loader},
        callbacks=callbacks,
        **given,
    )
    return {name: values[0] for name, values in history["valid"].items()}


def by_row(function: Any, k: int) -> float:
    pairs = zip(scores(), labels().long(), strict=True)
    return float(torch.stack([function(row, target, top_k=k) for row, target in pairs]).mean())


RANKED = {
    "hitrate": retrieval.retrieval_recall,
    "mrr": retrieval.retrieval_reciprocal_rank,
    "map": retrieval.retrieval_average_precision,
    "ndcg": retrieval.retrieval_normalized_dcg,
}


def ranking_callbacks() -> list[Any]:
    kinds = (dl.HitrateCallback, dl.MRRCallback, dl.MAPCallback, dl.NDCGCallback)
    return [kind("logits", "targets", topk=[1, 3]) for kind in kinds]


def region_callbacks() -> list[Any]:
    return [
        dl.IOUCallback("logits", "targets", threshold=0.5),
        dl.DiceCallback("logits", "targets", threshold=0.5, weights=[0.0] * 5 + [1.0]),
        dl.TrevskyCallback("logits", "targets", alpha=0.2, threshold=0.5),
        dl.MultilabelAccuracyCallback("logits", "targets"),
        dl.MultilabelPrecisionRecallF1SupportCallback("logits", "targets", num_classes=ITEMS),
    ]


def expected_of_regions() -> dict[str, float]:
    predicted, target = scores() > 0.5, labels() > 0
    tp = (predicted & target).sum(0).double()
    fp, fn = (predicted & ~target).sum(0).double(), (~predicted & target).sum(0).double()
    iou, dice = tp / (tp + fp + fn), 2 * tp / (2 * tp + fp + fn)
    return {
        "iou": iou.mean().item(),
        "iou/_micro": (tp.sum() / (tp + fp + fn).sum()).item(),
        "dice/_macro": dice.mean().item(),
        "dice/_weighted": dice[-1].item(),
        "trevsky": (tp / (tp + 0.8 * fp + 0.2 * fn)).mean().item(),
        "accuracy": (predicted == target).float().mean().item(),
        "precision/_micro": (tp.sum() / (tp + fp).sum()).item(),
    }


@pytest.mark.parametrize("given", [{}, pytest.param({"ddp": True}, marks=pytest.mark.serial)])
def test_ranking_and_regions(given: Any, preloaded: None) -> None:
    workers = {"workers": 2} if given else {}
    found = measured(
        [*ranking_callbacks(), *region_callbacks()], scores(), labels(), **given, **workers
    )
    for name, function in RANKED.items():
        for k in (1, 3):
            # It divides by the items that are relevant, of which some are not among the first.
            assert found[f"{name}{k:02}"] == pytest.approx(by_row(function, k), abs=1e-6)
        assert found[name] == found[f"{name}01"]
    for name, value in expected_of_regions().items():
        assert found[name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("given", [{}, pytest.param({"ddp": True}, marks=pytest.mark.serial)])
def test_the_number_of_classes_is_that_of_the_outputs(given: Any, preloaded: None) -> None:
    """Also where a worker has no sample of a loader, and for labels."""
    workers = {"workers": 2} if given else {}
    found = measured(
        [
            dl.AUCCallback("logits", "targets"),
            dl.MultilabelPrecisionRecallF1SupportCallback(
                "logits", "targets", threshold=0.3, prefix="label_"
            ),
        ],
        scores(),
        labels(),
        **given,
        **workers,
    )
    expected = {}
    for average in ("macro", "weighted"):
        expected[f"auc/_{average}"] = classification.multilabel_auroc(
            scores(), labels().long(), ITEMS, average=average
        )
        expected[f"label_f1/_{average}"] = classification.multilabel_f1_score(
            scores(), labels().long(), ITEMS, threshold=0.3, average=average
        )
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), abs=1e-6), name


def test_classes_that_are_not_given_give_what_given_ones_give() -> None:
    target = scores().argmax(1).roll(1)
    callbacks = [
        kind("logits", "targets", num_classes=number, prefix=prefix)
        for kind in (dl.AUCCallback, dl.PrecisionRecallF1SupportCallback)
        for number, prefix in ((ITEMS, "given_"), (None, "seen_"))
    ]
    loader = DataLoader(TensorDataset(scores(), target), 4)
    model = Same()
    history = dl.SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loaders={"train": loader, "valid": loader},
        callbacks=callbacks,
    )
    found = {name: values[0] for name, values in history["valid"].items()}
    expected = {
        "auc/_macro": classification.multiclass_auroc(scores(), target, ITEMS),
        "precision/_weighted": classification.multiclass_precision(
            scores(), target, ITEMS, average="weighted"
        ),
        "recall/_macro": classification.multiclass_recall(scores(), target, ITEMS),
        "f1/_micro": classification.multiclass_f1_score(scores(), target, ITEMS, average="micro"),
    }
    for name, value in expected.items():
        assert found[f"given_{name}"] == pytest.approx(float(value), abs=1e-6), name
        assert found[f"seen_{name}"] == found[f"given_{name}"]


def test_numbers_and_metrics_of_ones_own() -> None:
    output, target = scores()[:, :1], scores()[:, 1:2]
    found = measured(
        [
            dl.R2SquaredCallback("logits", "targets"),
            dl.FunctionalMetricCallback(
                "logits", "targets", lambda one, other: (one - other).abs().mean(), "absolute"
            ),
            dl.LoaderMetricCallback({"mae": MeanAbsoluteError()}, "logits", "targets"),
        ],
        output,
        target,
    )
    assert found["r2squared"] == pytest.approx(r2_score(output, target).item(), abs=1e-5)
    assert found["absolute"] == pytest.approx((output - target).abs().mean().item(), abs=1e-6)
    assert found["mae"] == pytest.approx(found["absolute"], abs=1e-6)


def test_what_is_no_metric_is_named() -> None:
    with pytest.raises(UserError, match="metric 'a' is a int"):
        dl.LoaderMetricCallback({"a": 3}, "logits", "targets")
    with pytest.raises(UserError, match=r"IOUCallback\(class_names="):
        dl.IOUCallback("logits", "targets", class_names=["one"])
