"""Callbacks of Catalyst's that measure: exact over all samples of all workers."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from allhands.catalyst import ranking
from allhands.catalyst.batch_callbacks import MetricCallback
from allhands.catalyst.translation import only_default
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


class _KeyedCallback(MetricCallback):
    """Measures by a name that a prefix and a suffix are put around.

    Args:
        measures: metrics by their names, and what comes behind the suffix.
        input_key, target_key: of the batch; None are the runner's.
        log_on_batch: without effect.
        prefix, suffix: of the names.
    """

    def __init__(
        self,
        measures: Mapping[tuple[str, str], Any],
        input_key: str | None,
        target_key: str | None,
        *,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        metrics = {
            f"{prefix or ''}{name}{suffix or ''}{end}": metric
            for (name, end), metric in measures.items()
        }
        super().__init__(metrics=metrics, keys=_keys(input_key, target_key))


class _TopKCallback(_KeyedCallback, ABC):
    """A measure of the first `k`, as ``name01``, ``name03``, …, and ``name``, the first of them.

    Args:
        topk: numbers of first items; None is 1.
        given: as for `_KeyedCallback`.
    """

    name: str

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        topk: Sequence[int] | None = None,
        **given: Any,
    ) -> None:
        first = topk or (1,)
        own = {k: self._of_first(k) for k in first}
        measures = {(f"{self.name}{k:02}", ""): one for k, one in own.items()}
        measures[self.name, ""] = own[first[0]]
        super().__init__(measures, input_key, target_key, **given)

    @abstractmethod
    def _of_first(self, k: int) -> Any:
        """What measures the first `k`."""


class AccuracyCallback(_TopKCallback):
    """Top-k accuracy: ``accuracy01``, ``accuracy03``, …, and ``accuracy``, which is the first.

    Args:
        input_key, target_key: those of the runner.
        topk: numbers of largest outputs; None is 1, and 3 and 5 where there are more classes.
        num_classes: decides what None means.
        given: `log_on_batch`, without effect; `prefix` and `suffix` of the names.
    """

    name = "accuracy"

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        topk: Sequence[int] | None = None,
        num_classes: int | None = None,
        **given: Any,
    ) -> None:
        if topk is None:
            topk = [1, *(k for k in (3, 5) if num_classes is not None and num_classes > k)]
        super().__init__(input_key, target_key, topk, **given)

    def _of_first(self, k: int) -> Any:
        return TopKAccuracy(k)


class _ClassesCallback(_KeyedCallback):
    """Scores over the classes, for each average.

    Args:
        input_key, target_key: of the batch.
        num_classes: how many there are; None takes the number that the outputs have.
        options: of torchmetrics' functions besides.
        given: `log_on_batch`, without effect; `prefix` and `suffix` of the names.
    """

    #: Names here, and torchmetrics'.
    kinds: Mapping[str, str] = {"precision": "precision", "recall": "recall", "f1": "f1_score"}
    averages: tuple[str, ...] = ("micro", "macro", "weighted")
    #: Whether the largest output is all that counts.
    labels = False

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        num_classes: int | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        **given: Any,
    ) -> None:
        from allhands.catalyst.classes import OfClasses, OverSamples

        measures = {
            (name, f"/_{average}"): OverSamples(
                OfClasses(kind, average, options), self.labels, num_classes
            )
            for name, kind in self.kinds.items()
            for average in self.averages
        }
        super().__init__(measures, input_key, target_key, **given)


class PrecisionRecallF1SupportCallback(_ClassesCallback):
    """Precision, recall and F1 over the classes: ``precision/_macro``, ``f1/_weighted``, …."""

    labels = True


class MultilabelPrecisionRecallF1SupportCallback(_ClassesCallback):
    """Precision, recall and F1 over the labels: ``precision/_macro``, ``f1/_weighted``, ….

    Args:
        input_key, target_key: of the batch.
        num_classes: how many labels there are; None takes the number that the outputs have.
        threshold: an output above it says that the label is there.
        given: `log_on_batch`, without effect; `prefix` and `suffix` of the names.
    """

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        num_classes: int | None = None,
        threshold: float = 0.5,
        **given: Any,
    ) -> None:
        super().__init__(input_key, target_key, num_classes, {"threshold": threshold}, **given)


class AUCCallback(_ClassesCallback):
    """The area under the ROC curve, the mean over the classes, or over the labels where targets
    have the outputs' shape: ``auc/_macro``, ``auc/_weighted``."""

    kinds: Mapping[str, str] = {"auc": "auroc"}
    averages = ("macro", "weighted")


class MultilabelAccuracyCallback(_KeyedCallback):
    """The share of labels that are right: ``accuracy``.

    Args:
        input_key, target_key: of the batch.
        threshold: an output above it says that the label is there.
        num_classes: without effect.
        given: `log_on_batch`, without effect; `prefix` and `suffix` of the name.
    """

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        threshold: float = 0.5,
        num_classes: int | None = None,
        **given: Any,
    ) -> None:
        measures = {("accuracy", ""): functools.partial(_labels_right, threshold=threshold)}
        super().__init__(measures, input_key, target_key, **given)


def _labels_right(output: torch.Tensor, target: torch.Tensor, threshold: float) -> torch.Tensor:
    return ((output > threshold) == (target > 0)).float().mean()


class R2SquaredCallback(_KeyedCallback):
    """The share of the variance that is explained: ``r2squared``."""

    def __init__(
        self, input_key: str | None = None, target_key: str | None = None, **given: Any
    ) -> None:
        from torchmetrics import R2Score

        super().__init__({("r2squared", ""): R2Score()}, input_key, target_key, **given)


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


class _RankingCallback(_TopKCallback):
    """A measure of ranked items; outputs and targets are both of shape ``[samples, items]``."""

    measure: Callable[..., torch.Tensor]

    def _of_first(self, k: int) -> Any:
        return functools.partial(type(self).measure, k=k)


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


class _RegionsCallback(_KeyedCallback):
    """A score of regions: ``iou/_micro``, ``iou/_macro`` and ``iou``, which is the latter;
    ``iou/_weighted`` with `weights`.

    Args:
        input_key, target_key: of the batch; both of one shape, such as ``[samples, classes, …]``.
        class_dim: the dimension of the classes.
        weights: of the classes.
        class_names: refused; no class has a number of its own.
        threshold: an output above it is 1, else 0; None takes outputs as they are.
        given: `log_on_batch`, without effect; `prefix` and `suffix` of the names.
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
        **given: Any,
    ) -> None:
        from allhands.catalyst.regions import Regions

        only_default(type(self).__name__, class_names=(class_names, None))
        averages = {"": "macro", "/_micro": "micro", "/_macro": "macro"}
        averages |= {"/_weighted": "weighted"} if weights is not None else {}
        measures = {
            (self.name, end): Regions(self._score(), average, class_dim, threshold, weights)
            for end, average in averages.items()
        }
        super().__init__(measures, input_key, target_key, **given)

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
