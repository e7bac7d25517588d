"""Scores of classes and of labels, whose number is seen in the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torchmetrics import Metric

from allhands.errors import UserError


class OverSamples(Metric):
    """A function of the outputs and targets of all samples of all workers.

    Args:
        measure: takes outputs of shape ``[samples, classes]`` and targets, whole numbers of shape
            ``[samples]`` or labels of the outputs' shape.
        labels: the outputs' classes are kept instead of the outputs, and how many there are.
        classes: how many there are; None takes what the outputs have.
    """

    full_state_update = False
    outputs: list[torch.Tensor]
    targets: list[torch.Tensor]
    number: torch.Tensor

    def __init__(
        self, measure: Callable[..., Any], labels: bool = False, classes: int | None = None
    ) -> None:
        super().__init__()
        self.measure, self.labels, self.classes = measure, labels, classes
        self.add_state("outputs", default=[], dist_reduce_fx="cat")
        self.add_state("targets", default=[], dist_reduce_fx="cat")
        self.add_state("number", default=torch.tensor(0), dist_reduce_fx="max")

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Take in a batch. Raises `UserError` for outputs of another number of classes."""
        if output.dim() != 2 or self.classes not in (None, output.shape[1]):
            raise UserError(
                f"the output has shape {list(output.shape)}, and it must be [samples, "
                f"{self.classes or 'classes'}]; write num_classes=… as the model has them, and the "
                "input_key of such an output"
            )
        self.number = self.number.clamp(min=output.shape[1])
        self.outputs.append(output.argmax(1) if self.labels else output)
        self.targets.append(target)

    def compute(self) -> torch.Tensor:
        """The score, one number."""
        if not len(self.outputs):
            return torch.tensor(float("nan"))
        outputs, targets = (
            torch.cat(kept) if isinstance(kept, list) else kept
            for kept in (self.outputs, self.targets)
        )
        score: torch.Tensor = self.measure(outputs, targets, int(self.number))
        return score


class OfClasses:
    """A score over the classes, by the name of torchmetrics' function without its first word.

    Args:
        name: such as "precision".
        average: "micro", "macro" or "weighted".
        options: of torchmetrics' function besides.
    """

    def __init__(self, name: str, average: str, options: Mapping[str, Any]) -> None:
        self.name, self.average, self.options = name, average, dict(options)

    def __call__(self, output: torch.Tensor, target: torch.Tensor, number: int) -> Any:
        """Of outputs and targets of all samples, of so many classes."""
        from torchmetrics.functional import classification

        if target.dim() == 1:
            measure = getattr(classification, f"multiclass_{self.name}")
        else:  # each class is a label of its own, which is there or not
            measure = getattr(classification, f"multilabel_{self.name}")
            target = target.long()
        return measure(output, target, number, average=self.average, **self.options)
