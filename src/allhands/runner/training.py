"""How a runner trains: epochs over loaders, metrics, history, callbacks. The same code in one
process and on every worker."""

from __future__ import annotations

import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.comm import hook_calls
from allhands.data import Feed
from allhands.errors import UserError
from allhands.loop import peak
from allhands.loop.announce import report_epoch
from allhands.loop.base_loop import BaseLoop
from allhands.loop.lifecycle import TrainingStopped
from allhands.loop.loggers import Loggers, loggers_of
from allhands.loop.loss_mean import LossMean
from allhands.loop.position import Position
from allhands.loop.reporter import Pace, Reporter
from allhands.loop.run_report import write_run_report
from allhands.loop.schedule import learning_rates
from allhands.report.history import History, Values, new_history
from allhands.runner.callbacks import overridden, run_hooks
from allhands.runner.evaluation import choose_valid_loader
from allhands.runner.handed_back import gather
from allhands.runner.running import running
from allhands.runner.train_settings import TrainSettings
from allhands.world import World

if TYPE_CHECKING:
    from allhands.runner.runner import Runner


class Training(ABC):
    """One call of `Runner.train`, on one rank; what callbacks are given.

    Attributes:
        loop: takes the steps.
        history: ``{"epoch": [1, 2, …], "step": […], "lr": […], "seconds": […], "train": {"loss":
            […], …}, "valid": {…}}``.
        metrics: the loss and the metrics of each loader.
        valid_loader: whose `main_metric` decides what is best.
        num_epochs: in all; None where only `max_steps` ends the training.
        best, best_epoch, best_step: the best value of it so far, and the epoch and the optimizer
            step that it is of.
    """

    metrics: Mapping[str, LossMean]

    def __init__(
        self, runner: Runner, settings: TrainSettings, world: World, reporter: Reporter
    ) -> None:
        self.settings, self.world, self.reporter = settings, world, reporter
        self.num_epochs = 3 if settings.check else settings.num_epochs
        self._loggers = Loggers(None)
        self._row_began = 0.0
        self._row_samples = 0  # trained on in the epoch that runs, by all ranks
        self.history = new_history()
        self.best: float | None = None
        self.best_epoch = self.best_step = 0
        self._best_state: Any = None
        self._step_hooks = overridden(settings.callbacks, "on_step_end")
        self.loop = loop = self._make_loop(runner)
        loop.logged.call = "training.log"
        if settings.evaluate_every is not None:
            loop.evaluate_between = self._evaluate_between
            for group in loop.groups.values():
                group.schedule.follow_evaluations()
        self.valid_loader = choose_valid_loader(loop.feeds, settings.valid_loader)
        loop.around_save = (
            lambda: run_hooks(settings.callbacks, "on_evaluate_end", self),
            lambda: run_hooks(settings.callbacks, "on_evaluate_start", self),
        )

    # ------------------------------------------------------------------ what a kind of step says

    @abstractmethod
    def _make_loop(self, runner: Any) -> BaseLoop:
        """The loop, and `metrics`."""

    @abstractmethod
    def _take_with(self, feed: Feed) -> Callable[[Any], None]:
        """What takes a step with a batch of a loader that is trained on."""

    @abstractmethod
    def _means(self, feed: Feed) -> dict[str, float]:
        """The means of a loader that is trained on, since they were begun."""

    @abstractmethod
    def _measure(self, feed: Feed) -> dict[str, float]:
        """The means of a loader that is not trained on."""

    # ------------------------------------------------------------------ for callbacks

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self.loop.epoch

    @property
    def step(self) -> int:
        """Optimizer steps taken, over all epochs."""
        return self.loop.global_step

    @property
    def model(self) -> nn.Module:
        """The model, or what this rank holds of it; not wrapped."""
        return self.loop.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self.loop.optimizer

    def stop(self, reason: str, now: bool = False) -> None:
        """End the training; to be called on every rank, or on none.

        Args:
            reason: is printed.
            now: after the current optimizer step, and not after the current epoch. The unfinished
                epoch is not evaluated and not in the history; with a logdir, a checkpoint is saved
                from which it can go on.
        """
        self.loop.stop(reason, now)

    def log(self, name: str, value: float | torch.Tensor, count: float = 1) -> None:
        """Add to a mean that is reported, over the epoch and all ranks, with the metrics of the
        loader that is trained on.

        For use in `Callback.on_step_end`, on every rank. A tensor stays on its device until the end
        of the epoch.

        Args:
            name: under which it appears.
            value: the mean of `count` items.
            count: its weight; 1 gives each step and rank the same.

        Raises:
            UserError: the name is taken, or is not logged on every rank (told at the end of the
                epoch).
        """
        self.loop.logged.add(name, value, count)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of the ranks; to be called on every rank, in any hook.

        What callbacks keep comes back from rank 0 alone, so this is how values of the others do.

        Args:
            value: None, numbers, strings, tensors, numpy arrays, and lists, tuples, dicts and sets
                of them.

        Returns:
            A list of ``world_size`` values, the same on every rank. Tensors are on the CPU.

        Raises:
            UserError: the value holds something else.
        """
        return gather(value, self.world)

    def save_checkpoint(self) -> None:
        """Save a checkpoint now, for use in `Callback.on_step_end`; to be called on every rank at
        the same step.

        Raises:
            UserError: there is no logdir, or no optimizer step was just taken.
        """
        if self.settings.logdir is None:
            raise UserError("save_checkpoint() has nowhere to write; pass logdir=… to train()")
        if self.loop.measure is None:
            raise UserError(
                "save_checkpoint() is for on_step_end; at the end of every epoch a checkpoint is "
                "saved anyway"
            )
        hook_calls.together(("saving a checkpoint after optimizer step", self.step))
        self.loop.save()

    # ------------------------------------------------------------------ the training

    def run(self) -> History:
        """Train, and give back the history. The user's own random generators are left as they were
        found.

        Raises:
            SystemExit: SIGTERM or SIGUSR1 came; all ranks have saved a checkpoint at the same step.
                The code is 128 plus the signal's number.
        """
        loop, settings = self.loop, self.settings
        with running(self), loop, self._guard():
            loop.regrouped = self._open_loggers
            self._open_loggers()
            self._row_began = time.perf_counter()
            try:
                self._hooks("on_train_start")
                try:
                    for position in loop.epochs():
                        self._epoch(position)
                except TrainingStopped:
                    pass
                if not loop.signal:
                    self._hooks("on_train_end")
            finally:
                self._loggers.close()
            self._say_where()
            loop.finish()
            write_run_report(loop, self._loggers)
            if settings.load_best_on_end and not loop.signal:
                self._load_best()
        return self.history

    def _open_loggers(self) -> None:
        rows, step = len(self.history["epoch"]), self.step or None
        self._loggers = loggers_of(
            self.settings, self.world, self.reporter, self._loggers, rows, step
        )

    def _guard(self) -> AbstractContextManager[None]:
        """A context in which the epochs run."""
        return nullcontext()

    def _epoch(self, position: Position) -> None:
        loop, settings = self.loop, self.settings
        self._row_samples = 0
        if not position.is_resumed:
            self._hooks("on_epoch_start")
        if not position.evaluating:
            for feed in loop.trained:
                if feed.name not in position.done:
                    self._train(feed, position)
                    means = loop.unit(partial(self._means, feed)) if self._row_is_due else {}
                    position.finish(feed.name, means)
            loop.end_steps()
        values: Values = dict(position.done)
        if settings.evaluate_every is not None and not any(values.values()):
            loop.end_epoch()
            self._hooks("on_epoch_end")
            loop.follow_schedules("epoch", math.nan)
            if loop.is_last:
                loop.save_epoch({})
            return
        values |= self._evaluate()
        rates, seconds = position.rates, loop.seconds
        if settings.evaluate_every is not None:
            rates, seconds = self._since_last_row()
        loop.end_epoch()
        improved = self._keep(values, rates, seconds)
        self._hooks("on_epoch_end")
        loop.follow_schedules("epoch", self._main(values))
        loop.save_epoch(values, improved)
        self._report(values, rates, seconds, improved, self._row_samples)

    def _evaluate_between(self) -> None:
        """Evaluate between two steps: a row of the history, and a checkpoint."""
        loop = self.loop
        assert loop.position is not None
        (feed,) = loop.trained
        evaluated = self._evaluate()
        values = {feed.name: loop.unit(partial(self._means, feed)), **evaluated}
        loop.position.evaluating_between = False
        loop.start_measure(self.metrics[feed.name])
        rates, seconds = self._since_last_row()
        improved = self._keep(values, rates, seconds)
        if self.settings.logdir is not None:
            loop.save(values, improved)
        self._report(values, rates, seconds, improved)

    # ------------------------------------------------------------------ rows

    @property
    def _row_is_due(self) -> bool:
        """Whether the epoch whose steps are through ends with a row of the history."""
        steps = self.history["step"]
        evaluated = bool(steps) and steps[-1] == self.step
        return self.settings.evaluate_every is None or (self.loop.is_last and not evaluated)

    def _since_last_row(self) -> tuple[list[float], float]:
        """The present learning rates, and the seconds since the last evaluation of this process."""
        before, self._row_began = self._row_began, time.perf_counter()
        return learning_rates(self.loop.optimizer), self._row_began - before

    def _keep(self, values: Values, rates: list[float], seconds: float) -> bool:
        """Add a row to the history; whether it is the best so far."""
        loop, settings = self.loop, self.settings
        epoch = loop.epoch + (loop.position is not None)
        row = {"epoch": epoch, "step": self.step, "lr": rates[0], "seconds": seconds}
        self.history.add(row, values)
        improved = settings.is_better(self._main(values), self.best)
        if improved:
            self.best, self.best_epoch, self.best_step = self._main(values), epoch, self.step
            if settings.load_best_on_end and settings.logdir is None:
                self._best_state = loop.copy_weights()
        self._hooks("on_row_end")
        loop.follow_schedules("evaluation", self._main(values))
        return improved

    def _report(
        self, values: Values, rates: list[float], seconds: float, improved: bool, samples: int = 0
    ) -> None:
        epoch, settings = self.history["epoch"][-1], self.settings
        by_steps = settings.evaluate_every is not None
        at = self.step if by_steps else epoch
        self._loggers.epoch(epoch, self.step, values, rates, seconds, at)
        place = _place(at, settings.max_steps if by_steps else self.num_epochs)
        what = "step" if by_steps else "epoch"
        left = None
        if self.num_epochs is not None and not by_steps:
            taken = self.history["seconds"]
            left = max(0, self.num_epochs - epoch) * sum(taken) / len(taken)
        report_epoch(self.reporter, what, place, values, rates[0], seconds, improved, samples, left)

    def _main(self, values: Values) -> float:
        name, measured = self.settings.main_metric, values[self.valid_loader]
        if name in measured:
            return measured[name]
        plateau = any(group.schedule.needs_metric for group in self.loop.groups.values())
        if name == "loss" and not self.settings.load_best_on_end and not plateau:
            return math.nan  # no epoch is the best
        raise UserError(
            f"main_metric={name!r} is not measured; loader '{self.valid_loader}' measures: "
            f"{', '.join(measured) or 'nothing'}"
        )

    # ------------------------------------------------------------------ loaders

    def _train(self, feed: Feed, position: Position) -> None:
        """Train on a loader for an epoch."""
        loop, reporter, metrics = self.loop, self.reporter, self.metrics[feed.name]
        log_every = self.settings.log_every
        take, total = self._take_with(feed), loop.steps_of_epoch(feed)
        label = self._label(feed)
        pace, next_log = Pace(), (loop.global_step // log_every + 1) * log_every
        first = loop.global_step - position.steps
        begun_at, began = position.samples, time.perf_counter()
        for batch in loop.train(feed, metrics):
            take(batch)
            if self._step_hooks:
                run_hooks(self._step_hooks, "on_step_end", self)
                loop.look()
            done = loop.global_step - first
            if reporter.shows_bar and done >= pace.next_look and pace.due(done):
                since = time.perf_counter() - began
                note = f"{(position.samples - begun_at) / since:,.0f} samples/s"
                note += f"  {peak.size_of(peak.taken(self.world))}"
                reporter.progress(label, done, total, metrics.running_loss(), note)
            if loop.global_step >= next_log:
                next_log = loop.global_step + log_every
                loop.check_finite()
                # On a pipeline's last stage alone, and rank 0 is the first.
                if loop.exchange.passes is not None:
                    metrics.share_loss()
                if self._loggers.active:
                    rates = learning_rates(self.loop.optimizer)
                    self._loggers.step(loop.global_step, metrics.running_loss(), rates)

        self._row_samples += position.samples - begun_at

    def _evaluate(self) -> Values:
        """The metrics of the loaders that are not trained on."""
        evaluated = [feed for feed in self.loop.feeds.values() if feed not in self.loop.trained]
        if not evaluated:
            return {}
        self._hooks("on_evaluate_start")
        # Feeds are others where members of the world have changed.
        measure = lambda name: self._measure(self.loop.feeds[name])  # noqa: E731
        values = {feed.name: self.loop.unit(partial(measure, feed.name)) for feed in evaluated}
        self._hooks("on_evaluate_end")
        return values

    def _label(self, feed: Feed) -> str:
        return f"{_place(self.epoch + 1, self.num_epochs)} {feed.name}"

    def _hooks(self, hook: str) -> None:
        run_hooks(self.settings.callbacks, hook, self)

    def _say_where(self) -> None:
        loop, logdir = self.loop, self.settings.logdir
        if loop.signal == signal.SIGINT:
            saved = f"; saved in {logdir}, go on with resume='auto'" if logdir is not None else ""
            self.reporter.line(
                f"interrupted {loop.where}: the model and the optimizer are as that left "
                f"them{saved}"
            )
        elif loop.stop_reason is not None and not loop.signal:
            self.reporter.line(f"stopped {loop.where}: {loop.stop_reason}")

    # ------------------------------------------------------------------ what is remembered

    def _load_best(self) -> None:
        if self.best is None:
            return
        folder = self.loop.checkpoints.folder
        if folder is not None:
            self.loop.checkpoints.wait()
            self.loop.checkpoints.load_weights(folder / "best")
        elif self._best_state is not None:
            self.loop.restore_weights(self._best_state)
        if folder is not None or self._best_state is not None:
            best = f"epoch, {self.best_epoch}"
            if self.settings.evaluate_every is not None:
                best = f"evaluation, after optimizer step {self.best_step}"
            self.reporter.line(f"loaded the weights of the best {best}")


def _place(number: int, total: int | None) -> str:
    return str(number) if total is None else f"{number}/{total}"
