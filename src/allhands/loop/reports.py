"""What a user's own loop prints and keeps of its steps."""

from __future__ import annotations

from typing import Any

import torch

from allhands.loop.announce import report_epoch
from allhands.loop.base_loop import BaseLoop
from allhands.loop.loggers import Loggers
from allhands.loop.loss_mean import LossMean
from allhands.loop.schedule import learning_rates
from allhands.loop.step_function import values_in
from allhands.report.history import History, Values


class Reports(BaseLoop):
    """The part of `allhands.Loop` that knows means, rows and the history.

    Attributes:
        measures: the losses of each loader that is trained on.
    """

    history: History
    measures: dict[str, LossMean]
    #: Of a training by steps, in all.
    num_steps = 0
    _loggers: Loggers | None = None
    # The optimizers that have taken a step in this epoch.
    _stepped: set[str]

    def _observe(
        self, name: str, output: Any, count: int, loss: torch.Tensor, factor: float, items: Any
    ) -> None:
        assert self.measure is not None
        self.measure.observe(output, count, loss, factor, items)
        if len(self.groups) > 1:
            self.logged.add(f"{name}_loss", loss.detach() * (factor / float(items)), float(items))
        for key, value in values_in(output).items():
            self.logged.add(key, value, count)

    def _record(self, epoch: int, values: Values, rates: list[float], seconds: float) -> None:
        row = {"epoch": epoch, "step": self.global_step, "lr": rates[0], "seconds": seconds}
        self.history.add(row, values)

    def _report(
        self,
        what: str,
        number: int,
        total: int | None,
        values: Values,
        rates: list[float],
        seconds: float,
    ) -> None:
        if self._loggers is not None:
            self._loggers.epoch(number, self.global_step, values, rates, seconds)
        place = f"{number}/{total}"
        report_epoch(self.reporter, what, place, values, rates[0], seconds, False)

    def means_so_far(self) -> dict[str, float]:
        """The means of the steps since this was asked for the last time."""
        measure = self.measure
        assert measure is not None
        values: dict[str, float] = {}
        if self._stepped:
            values = self.unit(lambda: self._means_of(measure))
        self.start_measure(measure)
        return values

    def report_step(self, number: int, values: Values) -> None:
        """Print a row of an iteration, and write it down."""
        rates, seconds = learning_rates(self.optimizer), self.seconds
        self._record(self.epoch + 1, values, rates, seconds)
        self._report("step", number, self.num_steps, values, rates, seconds)

    def measured(self, name: str) -> dict[str, float]:
        """The means of the steps of a loader in this epoch, over all ranks."""
        means: dict[str, float] = self.unit(lambda: self._means_of(self.measures[name]))
        return means

    def _means_of(self, measure: LossMean) -> dict[str, float]:
        values = measure.result() | self.exchange.epoch_values()
        if len(self.groups) > 1:
            del values["loss"]  # of several losses
        return values | self.logged.means(taken=values, everywhere=False)
