"""Callbacks of Catalyst's that measure: exact over all samples of all workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allhands.catalyst import ranking
from allhands.catalyst.batch_callbacks import MetricCallback
from allhands.catalyst.translation import only_default
from allhands.errors import UserError
from allhands.runner.metrics import named_metrics


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


class MultilabelAccuracyCallback(MetricCallback):
    """The share of labels that are right: ``accuracy``.

    Args:
        input_key, target_key: of the batch.
        threshold: an output above it says that the label is there.
        num_classes, log_on_batch: without effect.
        prefix, suffix: of the name.
    """

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        threshold: float = 0.5,
        num_classes: int | None = None,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        name = f"{prefix or ''}accuracy{suffix or ''}"
        right = functools.partial(_labels_right, threshold=threshold)
        super().__init__(metrics={name: right}, keys=_keys(input_key, target_key))


def _labels_right(output: torch.Tensor, target: torch.Tensor, threshold: float) -> torch.Tensor:
    return ((output > threshold) == (target > 0)).float().mean()


class MultilabelPrecisionRecallF1SupportCallback(MetricCallback):
    """Precision, recall and F1 over the labels: ``precision/_macro``, ``f1/_weighted``, ….

    Args:
        input_key, target_key: of the batch.
        num_classes: how many labels there are.
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
            "precision": classification.MultilabelPrecision,
            "recall": classification.MultilabelRecall,
            "f1": classification.MultilabelF1Score,
        }
        averages = ("micro", "macro", "weighted")
        metrics = _averaged(self, kinds, averages, num_classes, prefix, suffix)
        super().__init__(metrics=metrics, keys=_keys(input_key, target_key))


class R2SquaredCallback(MetricCallback):
    """The share of the variance that is explained: ``r2squared``.

    Args:
        input_key, target_key: of the batch.
        log_on_batch: without effect.
        prefix, suffix: of the name.
    """

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        from torchmetrics import R2Score

        name = f"{prefix or ''}r2squared{suffix or ''}"
        super().__init__(metrics={name: R2Score()}, keys=_keys(input_key, target_key))


class FunctionalMetricCallback(MetricCallback):
    """A function of an output and a target, the mean over the samples.

    Args:
        input_key, target_key: of the batch.
        metric_fn: the function.
        metric_key: its name.
        prefix, suffix: of the name.
    """

    def __init__(
        self,
        input_key: str,
        target_key: str,
        metric_fn: Callable[[Any, Any], Any],
        metric_key: str,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        name = f"{prefix or ''}{metric_key}{suffix or ''}"
        super().__init__(metrics={name: metric_fn}, keys=_keys(input_key, target_key))


class LoaderMetricCallback(MetricCallback):
    """A metric of torchmetrics, or a function as `FunctionalMetricCallback` takes it.

    Args:
        metric: the metric, or a dict by name.
        input_key, target_key: of the batch.

    Raises:
        UserError: it is a metric of another library.
    """

    def __init__(self, metric: Any, input_key: str, target_key: str) -> None:
        super().__init__(metrics=named_metrics(metric), keys=_keys(input_key, target_key))


class _RankingCallback(MetricCallback):
    """A measure of ranked items, as ``name01``, ``name03``, …, and ``name``, the first of them.

    Args:
        input_key, target_key: of the batch; both of shape ``[samples, items]``.
        topk: numbers of first items; None is 1.
        log_on_batch: without effect.
        prefix, suffix: of the names.
    """

    measure: Callable[..., torch.Tensor]
    name: str

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        topk: Sequence[int] | None = None,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        before, after, first = prefix or "", suffix or "", topk or (1,)
        own = {k: functools.partial(type(self).measure, k=k) for k in first}
        metrics = {f"{before}{self.name}{k:02}{after}": one for k, one in own.items()}
        metrics[f"{before}{self.name}{after}"] = own[first[0]]
        super().__init__(metrics=metrics, keys=_keys(input_key, target_key))


class HitrateCallback(_RankingCallback):
    """See `allhands.catalyst.ranking.hitrate`."""

    measure, name = staticmethod(ranking.hitrate), "hitrate"


class MRRCallback(_RankingCallback):
    """See `allhands.catalyst.ranking.mrr`."""

    measure, name = staticmethod(ranking.mrr), "mrr"


class MAPCallback(_RankingCallback):
    """See `allhands.catalyst.ranking.average_precision`."""

    measure, name = staticmethod(ranking.average_precision), "map"


class NDCGCallback(_RankingCallback):
    """See `allhands.catalyst.ranking.ndcg`."""

    measure, name = staticmethod(ranking.ndcg), "ndcg"


class _RegionsCallback(MetricCallback):
    """A score of regions: ``iou/_micro``, ``iou/_macro`` and ``iou``, which is the latter;
    ``iou/_weighted`` with `weights`.

    Args:
        input_key, target_key: of the batch; both of one shape, such as ``[samples, classes, …]``.
        class_dim: the dimension of the classes.
        weights: of the classes.
        class_names: refused; no class has a number of its own.
        threshold: an output above it is 1, else 0; None takes outputs as they are.
        log_on_batch: without effect.
        prefix, suffix: of the names.
    """

    name: str

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        class_dim: int = 1,
        weights: list[float] | None = None,
        class_names: list[str] | None = None,
        threshold: float | None = None,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        from allhands.catalyst.regions import Regions

        only_default(type(self).__name__, class_names=(class_names, None))
        name = f"{prefix or ''}{self.name}{suffix or ''}"
        averages = {"": "macro", "/_micro": "micro", "/_macro": "macro"}
        averages |= {"/_weighted": "weighted"} if weights is not None else {}
        metrics = {
            name + end: Regions(self._score(), average, class_dim, threshold, weights)
            for end, average in averages.items()
        }
        super().__init__(metrics=metrics, keys=_keys(input_key, target_key))

    def _score(self) -> Any:
        from allhands.catalyst import regions

        return getattr(regions, self.name)


class IOUCallback(_RegionsCallback):
    """Intersection over union."""

    name = "iou"


class DiceCallback(_RegionsCallback):
    """Twice the intersection over the sum of both."""

    name = "dice"


class TrevskyCallback(_RegionsCallback):
    """The intersection over itself and weighted misses.

    Args:
        input_key, target_key: of the batch.
        alpha: weight of the false negatives; that of the false positives is `beta`, or
            ``1 - alpha``.
        beta: see `alpha`.
        given: as for `IOUCallback`.
    """

    name = "trevsky"

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        alpha: float = 0.5,
        beta: float | None = None,
        **given: Any,
    ) -> None:
        self.alpha, self.beta = alpha, 1 - alpha if beta is None else beta
        super().__init__(input_key, target_key, **given)

    def _score(self) -> Any:
        from allhands.catalyst.regions import Trevsky

        return Trevsky(self.alpha, self.beta)


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
