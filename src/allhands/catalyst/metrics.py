"""What scripts import from ``catalyst.metrics``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from allhands.comm import sums_of_ranks
from allhands.errors import refuse_name
from allhands.world import current_world


class AdditiveMetric:
    """A mean, and its deviation, of numbers with weights; over all workers where `compute` is
    called, which all of them call together.

    Args:
        compute_on_call: ``metric(value, num_samples)`` gives the mean of this worker so far.
    """

    def __init__(self, compute_on_call: bool = True) -> None:
        self.compute_on_call = compute_on_call
        self.reset()

    def reset(self) -> None:
        """Nothing was measured yet."""
        self._sums = [0.0, 0.0, 0.0]

    def update(self, value: float | torch.Tensor, num_samples: int) -> float:
        """Take in the mean of `num_samples`."""
        value = float(value)
        new = (num_samples, value * num_samples, value * value * num_samples)
        self._sums = [one + other for one, other in zip(self._sums, new, strict=True)]
        return value

    def __call__(self, value: float | torch.Tensor, num_samples: int) -> Any:
        self.update(value, num_samples)
        return _moments(self._sums) if self.compute_on_call else None

    def compute(self) -> tuple[float, float]:
        """The mean and the standard deviation."""
        world = current_world()
        if world is None:
            return _moments(self._sums)
        return _moments(sums_of_ranks(self._sums, world))


def _moments(sums: Sequence[float]) -> tuple[float, float]:
    count, total, squares = sums
    if not count:
        return math.nan, math.nan
    mean = total / count
    return mean, math.sqrt(max(0.0, squares / count - mean * mean))


def accuracy(
    outputs: torch.Tensor, targets: torch.Tensor, topk: Sequence[int] = (1,)
) -> list[torch.Tensor]:
    """For each k, the share of samples whose target is among the k largest outputs.

    Args:
        outputs: of shape ``[samples, classes]``.
        targets: classes, of shape ``[samples]``.
        topk: numbers of largest outputs.
    """
    from allhands.catalyst.metric_callbacks import TopKAccuracy

    return [TopKAccuracy(k)(outputs, targets) for k in topk]


def __getattr__(name: str) -> Any:
    instead = "a metric of torchmetrics, or a callback of dl that measures"
    known = name.endswith(("Metric", "Squared")) or name in (
        "auc",
        "dice",
        "iou",
        "hitrate",
        "map",
        "mrr",
    )
    refuse_name(__name__, name, {name: instead} if known else {})


__all__ = ["AdditiveMetric", "accuracy"]
