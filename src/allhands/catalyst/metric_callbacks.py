"""Callbacks of Catalyst's that measure: exact over all samples of all workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allhands.catalyst.batch_callbacks import MetricCallback
from allhands.errors import UserError


class TopKAccuracy:
    """The share of samples whose target is among the `k` largest outputs.

    Args:
        k: how many.
    """

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Of ``[samples, classes]`` and ``[samples]``."""
        places = output.topk(self.k, dim=1).indices
        return (places == target.unsqueeze(1)).any(dim=1).float().mean()


class AccuracyCallback(MetricCallback):
    """Top-k accuracy: ``accuracy01``, ``accuracy03``, …, and ``accuracy``, which is the first.

    Args:
        input_key, target_key: those of the runner.
        topk: numbers of largest outputs; None is 1, and 3 and 5 where there are more classes.
        num_classes: decides what None means.
        log_on_batch: without effect.
        prefix, suffix: of the names.
    """

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        topk: Sequence[int] | None = None,
        num_classes: int | None = None,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        if topk is None:
            topk = [1, *(k for k in (3, 5) if num_classes is not None and num_classes > k)]
        before, after = prefix or "", suffix or ""
        metrics = {f"{before}accuracy{k:02}{after}": TopKAccuracy(k) for k in topk}
        metrics[f"{before}accuracy{after}"] = TopKAccuracy(topk[0])
        super().__init__(metrics=metrics, keys=_keys(input_key, target_key))


class PrecisionRecallF1SupportCallback(MetricCallback):
    """Precision, recall and F1 over the classes: ``precision/_macro``, ``f1/_weighted``, ….

    Args:
        input_key, target_key: those of the runner.
        num_classes: how many there are.
        log_on_batch: without effect.
        prefix, suffix: of the names.

    Raises:
        UserError: `num_classes` is not given.
    """

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        num_classes: int | None = None,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        from torchmetrics import classification

        kinds = {
            "precision": classification.MulticlassPrecision,
            "recall": classification.MulticlassRecall,
            "f1": classification.MulticlassF1Score,
        }
        averages = ("micro", "macro", "weighted")
        metrics = _averaged(self, kinds, averages, num_classes, prefix, suffix)
        super().__init__(metrics=metrics, keys=_keys(input_key, target_key))


class AUCCallback(MetricCallback):
    """The area under the ROC curve, the mean over the classes: ``auc/_macro``, ``auc/_weighted``.

    Args:
        input_key, target_key: those of the runner.
        num_classes: how many there are.
        prefix, suffix: of the names.

    Raises:
        UserError: `num_classes` is not given.
    """

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        num_classes: int | None = None,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        from torchmetrics.classification import MulticlassAUROC

        kinds, averages = {"auc": MulticlassAUROC}, ("macro", "weighted")
        metrics = _averaged(self, kinds, averages, num_classes, prefix, suffix)
        super().__init__(metrics=metrics, keys=_keys(input_key, target_key))


def _keys(input_key: str | None, target_key: str | None) -> dict[str, Any]:
    return {"output_key": input_key, "target_key": target_key}


def _averaged(
    callback: MetricCallback,
    kinds: Mapping[str, Callable[..., Any]],
    averages: Sequence[str],
    num_classes: int | None,
    prefix: str | None,
    suffix: str | None,
) -> dict[str, Any]:
    """Metrics of torchmetrics over the classes, for each kind and average."""
    if num_classes is None:
        raise UserError(
            f"{type(callback).__name__} needs to know how many classes there are; write "
            "num_classes=10"
        )
    return {
        f"{prefix or ''}{name}{suffix or ''}/_{average}": kind(num_classes, average=average)
        for name, kind in kinds.items()
        for average in averages
    }
