"""A moving average of the weights, which is evaluated and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from allhands.checks import check_whole, is_number
from allhands.errors import UserError
from allhands.runner.callbacks import Callback

if TYPE_CHECKING:
    from allhands.runner.training import Training


class AveragedWeights(Callback):
    """Keep an average of the trained weights, evaluate with it, and leave it in the model at the
    end.

    The training goes on with its own weights, which checkpoints hold; the average is in them
    beside. Under `fsdp` and in meshes each rank averages its part. BatchNorm's running statistics
    stay the training's own.

    Sources: B. Polyak and A. Juditsky, "Acceleration of Stochastic Approximation by Averaging",
    1992 (with a decay); P. Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
    Generalization", 2018 (the plain mean).

    Args:
        decay: after each update the average is ``decay`` of itself and ``1 - decay`` of the
            weights; a number from 0 to 1. None takes the mean of all weights since `start`.
        start: the optimizer step after which the average begins, with the weights of then.
        every: optimizer steps between two updates.
        load_at_end: leave the average in the model when the training ends; False leaves the
            training's own weights.

    Attributes:
        average: tensors by the parameters' names; empty before `start`.

    Raises:
        UserError: an argument is none of these; as the training begins, with `load_at_end` and
            ``train(load_best_on_end=True)``.
    """

    def __init__(
        self, decay: float | None = 0.999, start: int = 1, every: int = 1, load_at_end: bool = True
    ) -> None:
        if decay is not None and not (is_number(decay) and 0 < decay < 1):
            raise UserError(
                f"AveragedWeights(decay={decay!r}): decay must be a number between 0 and 1, such "
                "as 0.999, or None for the mean of all"
            )
        check_whole("start", start, of="AveragedWeights")
        check_whole("every", every, of="AveragedWeights")
        self.decay, self.start, self.every, self.load_at_end = decay, start, every, load_at_end
        self.average: dict[str, torch.Tensor] = {}
        self._count = 0

    def on_train_start(self, training: Training) -> None:
        if self.load_at_end and training.settings.load_best_on_end:
            raise UserError(
                "AveragedWeights() leaves the average in the model at the end, and "
                "load_best_on_end=True the training's own weights of the best epoch. Write "
                "AveragedWeights(load_at_end=False), or leave load_best_on_end out"
            )
        own = _weights(training)
        self.average = {name: value.to(own[name].device) for name, value in self.average.items()}

    def on_step_end(self, training: Training) -> None:
        step = training.step
        if step < self.start or (step - self.start) % self.every:
            return
        own = _weights(training)
        if not self.average:
            self.average = {name: value.clone() for name, value in own.items()}
            self._count = 1
            return
        update = get_swa_multi_avg_fn() if self.decay is None else get_ema_multi_avg_fn(self.decay)
        update(list(self.average.values()), [own[name] for name in self.average], self._count)
        self._count += 1

    def on_evaluate_start(self, training: Training) -> None:
        self._swap(training)

    def on_evaluate_end(self, training: Training) -> None:
        self._swap(training)

    def on_train_end(self, training: Training) -> None:
        if self.load_at_end:
            own = _weights(training)
            for name, value in self.average.items():
                own[name].copy_(value)

    def _swap(self, training: Training) -> None:
        own = _weights(training)
        for name, value in self.average.items():
            before = own[name].clone()
            own[name].copy_(value)
            value.copy_(before)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self._count = dict(state["average"]), state["count"]


def _weights(training: Training) -> dict[str, torch.Tensor]:
    """What this rank holds of the floating point parameters, without gradients."""
    return {
        name: parameter.data
        for name, parameter in training.model.named_parameters()
        if parameter.is_floating_point()
    }
