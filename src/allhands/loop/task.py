"""What the steps of a loop compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from allhands.step import LossRule


@dataclass
class Task:
    """What is known of a loop's steps before the first of them.

    Attributes:
        call: ``(module, batch)`` calls the module on a batch, for strategies that try the model
            before the first step; None where only a step function of the user's can.
        criterion: the loss; looked at where steps are captured.
        rows_of: the rows in a batch that a collate function of the user's has made; None: as many
            as it was given.
        own_calls: the code of the user's that calls the model in a step, as the beginning of a
            sentence; "" where there is none.
        outputs: whether outputs and targets are "kept" after a step, "read" in it alone, or
            "unread".
        shows_gradients: gradients are looked at after a step.
        runner: who calls the model on a batch, as `allhands.plan` takes it; None where steps are
            the user's own.
    """

    call: Callable[[nn.Module, Any], Any] | None
    criterion: Any
    rows_of: Callable[[Any], int | None]
    own_calls: str = ""
    outputs: str = "read"
    shows_gradients: bool = False
    runner: Any = None


@dataclass
class Objective:
    """What one kind of step computes.

    Attributes:
        forward: takes a micro-batch to ``(output, target)``; has the ``module`` that it calls.
        rule: the criterion, and how its value counts.
        target_of: the target in a micro-batch.
        observer: gives what is told the result of each micro-batch, see
            `allhands.step.optimizer_step`; asked when a loader's epoch begins.
    """

    forward: Any
    rule: LossRule
    target_of: Callable[[Any], Any]
    observer: Callable[[], Callable[..., None]]
