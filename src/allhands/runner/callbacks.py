"""Hooks into a training. A hook that is not overridden costs nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from allhands.comm import hook_calls
from allhands.errors import UserError

if TYPE_CHECKING:
    from allhands.runner.training import Training


class Callback:
    """Override what you need; every hook runs on every rank, at the same points.

    `training` shows ``epoch`` (finished epochs), ``step`` (optimizer steps so far), ``num_epochs``,
    ``model`` (unwrapped), ``optimizer``, ``world``, ``history``, and ``stop(reason)``, which ends
    the training after the current epoch. ``gather(value)`` gives every rank's value.

    Where workers were started, each has a copy of the callbacks. Afterwards the attributes of rank
    0's are in yours, and so is what its hooks changed in lists, dicts and names of your script.
    """

    def on_train_start(self, training: Training) -> None:
        """Before the first epoch, after a checkpoint was restored."""

    def on_epoch_start(self, training: Training) -> None:
        """Before an epoch."""

    def on_step_end(self, training: Training) -> None:
        """After an optimizer step."""

    def on_evaluate_start(self, training: Training) -> None:
        """Before the loaders of an epoch that are not trained on are evaluated, where there are
        any.

        Weights that are swapped in here (a moving average) are what is evaluated. Write them by
        ``parameter.data.copy_(…)``, and put the training's own ones back in `on_evaluate_end`:
        checkpoints, and the weights of the best epoch, hold those. A checkpoint that is due in the
        middle of an evaluation is saved between the two.
        """

    def on_evaluate_end(self, training: Training) -> None:
        """After the evaluation of an epoch, and before a checkpoint that is saved in the middle of
        it."""

    def on_row_end(self, training: Training) -> None:
        """After a row was added to the history, before the checkpoint with it is written: at the
        end of each epoch, or with ``evaluate_every`` after each evaluation."""

    def on_epoch_end(self, training: Training) -> None:
        """After an epoch's training and evaluation, before its checkpoint is written."""

    def on_train_end(self, training: Training) -> None:
        """After the last epoch."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, made of numbers, strings, tensors, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""


class EarlyStopping(Callback):
    """Stop when a metric of the validation loader has not improved for `patience` epochs.

    Args:
        patience: epochs without improvement before stopping; with ``evaluate_every`` evaluations,
            after the last of which the training stops at once.
        metric: "loss" or the name of a metric.
        minimize: whether smaller is better.
        min_delta: an improvement must be larger than this.
        loader: the loader whose metric is watched; None takes the validation loader.
    """

    def __init__(
        self,
        patience: int,
        metric: str = "loss",
        minimize: bool = True,
        min_delta: float = 0.0,
        loader: str | None = None,
    ) -> None:
        if patience < 1:
            raise UserError(
                f"EarlyStopping(patience={patience}): patience must be at least 1 epoch"
            )
        self.patience = patience
        self.metric = metric
        self.minimize = minimize
        self.min_delta = min_delta
        self.loader = loader
        self.best: float | None = None
        self.waited = 0

    def on_row_end(self, training: Training) -> None:
        loader = self.loader or training.valid_loader
        measured = training.history.get(loader, {})
        if self.metric not in measured:
            raise UserError(
                f"EarlyStopping(metric={self.metric!r}): loader '{loader}' measures "
                f"{', '.join(measured) or 'nothing'}; write one of these"
            )
        value = measured[self.metric][-1]
        better = not math.isnan(value) and (
            self.best is None
            or (self.best - value if self.minimize else value - self.best) > self.min_delta
        )
        if better:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            by_steps = training.settings.evaluate_every is not None
            rows = "evaluations" if by_steps else "epochs"
            reason = f"{loader} {self.metric} has not improved for {self.waited} {rows}"
            training.stop(reason, now=by_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


def overridden(callbacks: list[Callback], hook: str) -> list[Callback]:
    """The callbacks that do something at `hook`."""
    return [callback for callback in callbacks if is_overridden(callback, hook)]


def is_overridden(callback: Callback, hook: str, base: type[Callback] = Callback) -> bool:
    """Whether a callback does something at `hook` that `base` does not: by its class, or by a
    function that was set on the object."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(base, hook)


def run_hooks(callbacks: list[Callback], hook: str, training: Any) -> None:
    """Call `hook` of those that override it; where it is, is told should this rank be waited
    for."""
    for callback in overridden(callbacks, hook):
        call_hook(callback, hook, training)


def call_hook(callback: Callback, hook: str, about: Any) -> None:
    """Call a hook with what it is about; where it is, is told should this rank be waited for."""
    before = hook_calls.enter(callback, hook)
    try:
        getattr(callback, hook)(about)
    finally:
        hook_calls.leave(before)


def callback_list(callbacks: Any) -> list[Callback]:
    """Callbacks as a list, from a list, a dict (its values), one callback, or None."""
    if callbacks is None:
        return []
    if isinstance(callbacks, Mapping):
        return list(callbacks.values())
    return list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
