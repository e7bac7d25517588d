"""A learning rate, found by a short training whose rate grows."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from allhands.checks import check_whole, is_number
from allhands.errors import UserError
from allhands.loop.schedule import learning_rates
from allhands.report.figures import new_figure, save_figure
from allhands.report.rate_plot import draw_rates
from allhands.runner.callbacks import Callback
from allhands.runner.supervised import SupervisedRunner
from allhands.step import NonFiniteLossError

if TYPE_CHECKING:
    from allhands.runner.training import Training

# The share of the losses before in a smoothed one.
_SMOOTH = 0.9
# The training ends where the smoothed loss is so many times the smallest.
_DIVERGED = 4.0


@dataclass
class LearningRates:
    """What `find_learning_rate` has seen.

    Attributes:
        rates: of each step, growing.
        losses: the mean over the global batch of each step, smoothed.
        suggestion: the rate at which the loss falls fastest.
    """

    rates: list[float]
    losses: list[float]
    suggestion: float

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the loss over the learning rate, with a mark at the suggestion.

        As the last line of a notebook's cell it is shown there.

        Args:
            path: of a file to write as well; its ending says the format.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            UserError: matplotlib is not installed, or the file cannot be written.
        """
        figure = new_figure(6, 3.6)
        draw_rates(figure.subplots(), self.rates, self.losses, self.suggestion)
        if path is not None:
            save_figure(figure, path)
        return figure


class RateRecorder(Callback):
    """The rate and the smoothed loss of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._before = (0.0, 0.0)
        self._smooth = self._rate = 0.0

    def on_train_start(self, training: Training) -> None:
        self._rate = learning_rates(training.optimizer)[0]

    def on_epoch_start(self, training: Training) -> None:
        self._before = (0.0, 0.0)

    def on_step_end(self, training: Training) -> None:
        (feed,) = training.loop.trained
        now = training.metrics[feed.name].sums()
        own = [a - b for a, b in zip(now, self._before, strict=True)]
        self._before = now
        loss, count = (sum(column) for column in zip(*training.gather(own), strict=True))
        step = len(self.losses) + 1
        self._smooth = _SMOOTH * self._smooth + (1 - _SMOOTH) * loss / count
        self.rates.append(self._rate)
        self._rate = learning_rates(training.optimizer)[0]  # of the next step
        self.losses.append(self._smooth / (1 - _SMOOTH**step))
        if self.losses[-1] > _DIVERGED * min(self.losses) or not math.isfinite(self.losses[-1]):
            training.stop("the loss has diverged", now=True)


def find_learning_rate(
    *,
    model: nn.Module,
    criterion: Any,
    optimizer: torch.optim.Optimizer,
    start: float = 1e-6,
    end: float = 1.0,
    steps: int = 100,
    runner: SupervisedRunner | None = None,
    **options: Any,
) -> LearningRates:
    """Train a copy of the model for some steps, while the learning rate grows from `start` to
    `end`, by the same factor in each; model and optimizer stay as they are.

    The samples and losses are those of the global batch, so that the answer is the same on any
    number of workers with the same global batch. Groups of the optimizer keep the ratio of their
    rates. It ends early where the loss diverges. Source: L. Smith, "Cyclical Learning Rates for
    Training Neural Networks", 2017.

    Args:
        model, criterion, optimizer: as for `SupervisedRunner.train`.
        start, end: the first and the last rate.
        steps: optimizer steps, at least 10.
        runner: trains; None makes a `SupervisedRunner`.
        options: further arguments of `train`, such as datasets, distributed, workers, precision.

    Raises:
        UserError: an argument is none of these, or the loss was not finite before it had diverged.
    """
    if not (is_number(start) and is_number(end) and 0 < start < end):
        raise UserError(
            f"find_learning_rate(start={start!r}, end={end!r}): both are above 0, and end is larger"
        )
    check_whole("steps", steps, at_least=10, of="find_learning_rate")
    model, optimizer = copy.deepcopy((model, optimizer))
    ratio = start / optimizer.param_groups[0]["lr"]
    for group in optimizer.param_groups:
        group["lr"] *= ratio
        group.pop("initial_lr", None)
    growth = ExponentialLR(optimizer, (end / start) ** (1 / (steps - 1)))
    watch = RateRecorder()
    try:
        (SupervisedRunner() if runner is None else runner).train(
            model=model,
            criterion=criterion,
            optimizer=optimizer,
            scheduler=(growth, "step"),
            max_steps=steps,
            callbacks=[watch],
            **options,
        )
    except NonFiniteLossError as error:
        if len(watch.losses) < 3:
            raise UserError(
                f"find_learning_rate(start={start}, end={end}): {error}. Write a smaller end"
            ) from error
    slopes = [after - before for before, after in itertools.pairwise(watch.losses)]
    steepest = min(range(len(slopes)), key=slopes.__getitem__)
    return LearningRates(watch.rates, watch.losses, watch.rates[steepest])
