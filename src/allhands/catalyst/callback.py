"""Callbacks whose hooks are given Catalyst's runner."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import allhands.runner
from allhands.errors import UserError
from allhands.runner.callbacks import is_overridden


class CallbackOrder(IntEnum):
    """When a callback's hooks are called, beside those of others."""

    Internal = 0
    Metric = 10
    MetricAggregation = 20
    Backward = 30
    Optimizer = 40
    Scheduler = 50
    Checkpoint = 60
    External = 100


class BatchHooks:
    """Catalyst's hooks, of callbacks and of a runner itself."""

    def on_experiment_start(self, runner: Any) -> None:
        """Before the first epoch."""

    def on_epoch_start(self, runner: Any) -> None:
        """Before an epoch."""

    def on_loader_start(self, runner: Any) -> None:
        """Before a loader of an epoch; with a resumed epoch, before what is left of it."""

    def on_batch_start(self, runner: Any) -> None:
        """Before a batch; ``runner.batch`` is what the loader gave."""

    def on_batch_end(self, runner: Any) -> None:
        """After a batch; numbers in ``runner.batch_metrics`` are means over its samples."""

    def on_loader_end(self, runner: Any) -> None:
        """After a loader; ``runner.loader_metrics`` are means over all samples of all workers."""

    def on_epoch_end(self, runner: Any) -> None:
        """After an epoch; ``runner.epoch_metrics`` has the metrics by loader."""

    def on_experiment_end(self, runner: Any) -> None:
        """After the last epoch."""


class Callback(BatchHooks, allhands.runner.Callback):
    """Catalyst's hooks, each given the runner; those of `allhands.Callback` are given the training.

    Args:
        order: callbacks with a lower one come first.
    """

    order: int = CallbackOrder.External

    def __init__(self, order: int = CallbackOrder.External) -> None:
        self.order = order

    def on_train_start(self, training: Any) -> None:
        if not hasattr(training, "runner"):
            raise UserError(
                f"{type(self).__name__} is a Callback of allhands.catalyst, whose hooks are given "
                "its runner; use dl.SupervisedRunner or dl.Runner, or derive it from "
                "allhands.Callback"
            )


#: Hooks that a runner has too, and when they come in a training.
EXPERIMENT_HOOKS = {
    "on_train_start": "on_experiment_start",
    "on_epoch_start": "on_epoch_start",
    "on_epoch_end": "on_epoch_end",
    "on_train_end": "on_experiment_end",
}
BATCH_HOOKS = ("on_loader_start", "on_batch_start", "on_batch_end", "on_loader_end")
HOOKS = (*EXPERIMENT_HOOKS.values(), *BATCH_HOOKS)


def has_hook(callback: Any, hook: str) -> bool:
    """Whether a callback does something at one of Catalyst's hooks."""
    return isinstance(callback, Callback) and is_overridden(callback, hook, Callback)
