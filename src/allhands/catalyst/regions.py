"""How much of the regions of each class is found: intersection over union, and its kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchmetrics import Metric

_EPS = 1e-7

#: Of true positives, false positives and false negatives.
Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def iou(tp: torch.Tensor, fp: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """Intersection over union."""
    return (tp + _EPS) / (tp + fp + fn + _EPS)


def dice(tp: torch.Tensor, fp: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """Twice the intersection over the sum of both."""
    return (2 * tp + _EPS) / (2 * tp + fp + fn + _EPS)


class Trevsky:
    """The intersection over itself and weighted misses.

    Args:
        alpha: weight of the false negatives.
        beta: that of the false positives.
    """

    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha, self.beta = alpha, beta

    def __call__(self, tp: torch.Tensor, fp: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
        """The score of each class."""
        return (tp + _EPS) / (tp + self.beta * fp + self.alpha * fn + _EPS)


class Regions(Metric):
    """A score of regions over all samples of all workers.

    Args:
        score: of the counts.
        average: "micro" of the counts of all classes together, "macro" the mean over the classes,
            or the number of a class.
        class_dim: the dimension of the classes in outputs and targets, which have one shape.
        threshold: an output above it is 1, else 0; None takes outputs as they are.
        weights: of the classes, for average="weighted".
    """

    full_state_update = False
    tp: list[torch.Tensor]
    fp: list[torch.Tensor]
    fn: list[torch.Tensor]

    def __init__(
        self,
        score: Score,
        average: str,
        class_dim: int = 1,
        threshold: float | None = None,
        weights: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.score, self.average, self.weights = score, average, weights
        self.class_dim, self.threshold = class_dim, threshold
        for name in ("tp", "fp", "fn"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Count, of tensors of one shape."""
        if self.threshold is not None:
            output = (output > self.threshold).to(torch.float32)
        target = target.to(output.dtype)
        others = [d for d in range(output.dim()) if d != self.class_dim % output.dim()]
        for kept, value in (
            (self.tp, output * target),
            (self.fp, output * (1 - target)),
            (self.fn, (1 - output) * target),
        ):
            kept.append(value.double().sum(dim=others)[None])

    def compute(self) -> torch.Tensor:
        """The score."""
        counts = [_joined(kept).sum(0) for kept in (self.tp, self.fp, self.fn)]
        if self.average == "micro":
            return self.score(*(count.sum() for count in counts))
        scores = self.score(*counts)
        if self.average == "weighted":
            assert self.weights is not None
            return (scores * torch.tensor(self.weights, device=scores.device)).sum()
        return scores.mean()


def _joined(kept: Any) -> torch.Tensor:
    return torch.cat(kept) if isinstance(kept, list) else kept
