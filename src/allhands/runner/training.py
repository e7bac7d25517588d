"""The training loop: epochs, evaluation, history. The same code in one process and on every
worker."""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.comm import calls, hook_calls
from allhands.data import (
    CountedRows,
    Feed,
    build_feeds,
    derive_seed,
    preserved_generators,
    seed_everything,
)
from allhands.errors import UserError
from allhands.launch import handback
from allhands.runner import peak
from allhands.runner.agreement import SIGNALS, Agreement, requeue_if_asked
from allhands.runner.announce import announce, report_epoch
from allhands.runner.callbacks import overridden, run_hooks
from allhands.runner.capturing import captured_steps, captures_steps
from allhands.runner.compiling import compiling
from allhands.runner.evaluation import (
    Forward,
    choose_valid_loader,
    evaluate_feed,
    loss_rule,
    try_on,
)
from allhands.runner.handed_back import gather
from allhands.runner.logged import Logged
from allhands.runner.loggers import Loggers
from allhands.runner.metrics import LoaderMetrics
from allhands.runner.passes import Passes
from allhands.runner.position import Position
from allhands.runner.recomputing import recomputing
from allhands.runner.reporter import Pace, Reporter
from allhands.runner.running import running
from allhands.runner.schedule import Schedule, learning_rates
from allhands.runner.settings import TrainSettings, check_sync_batch_norm
from allhands.runner.training_checkpoints import TrainingCheckpoints
from allhands.step import OptimizerStep, Precision
from allhands.step.closure import ClosureStep, takes_closure
from allhands.step.update import set_mode
from allhands.strategies.alike import check_buffers_equal
from allhands.world import World

if TYPE_CHECKING:
    from allhands.runner.supervised import SupervisedRunner

History = dict[str, Any]


class _Left(Exception):
    """The training ends in the middle of an epoch, on all ranks."""


class Training:
    """One call of `SupervisedRunner.train`, on one rank.

    Attributes:
        epoch: finished epochs.
        step: optimizer steps taken, over all epochs.
        history: ``{"epoch": [1, 2, …], "step": […], "lr": […], "seconds": […], "train": {"loss":
            […], …}, "valid": {…}}``.
        position: how far the epoch that runs has come; None between two epochs.
        measuring: the metrics of the loader that is trained on; None between two loaders.
    """

    def __init__(
        self, runner: SupervisedRunner, settings: TrainSettings, world: World, reporter: Reporter
    ) -> None:
        self.settings = settings
        self.world = world
        self.reporter = reporter
        self.model = settings.model
        self.optimizer = settings.optimizer
        self.criterion = settings.criterion
        self.num_epochs = 3 if settings.check else settings.num_epochs
        self.epoch = self.step = 0
        self.history: History = {"epoch": [], "step": [], "lr": [], "seconds": []}
        self.best: float | None = None
        self.best_epoch = 0
        self.position: Position | None = None
        self.measuring: LoaderMetrics | None = None
        self._looked = False  # at what the first step has done to buffers
        self._stop_reason: str | None = None
        self._stop_now = False
        self._signal = 0
        # steps of evaluation; with the optimizer steps, they number the rounds of the agreement
        self._evaluated = 0
        self._best_state: dict[str, torch.Tensor] | None = None
        self._limit = 1 if settings.overfit else 3 if settings.check else None
        self.passes = None if settings.steps_per_epoch is None or settings.overfit else Passes()

        settings.strategy.check(world)
        check_sync_batch_norm(self.model, world)
        self.feeds = build_feeds(
            settings.data.sources(settings.seed),
            world,
            settings.seed,
            settings.accumulate,
            settings.data.same_everywhere,
            settings.strategy.place(world),
            settings.strategy.level,
        )
        self.trained = [feed for name, feed in self.feeds.items() if name.startswith("train")]
        self.valid_loader = choose_valid_loader(self.feeds, settings.valid_loader)
        if not settings.strategy.takes_meta:
            self._to_device()
        self.precision = Precision(settings.precision, world.device)
        settings.strategy.scaler = scaler = self.precision.scaler
        if scaler is not None and settings.strategy.parted and world.world_size > 1:
            scaler.together = world
        settings.strategy.captures = captures_steps(self, not runner.plain_batches)
        settings.strategy.seed = settings.seed
        settings.strategy.try_on = partial(
            try_on, runner, self.trained[0], self.precision, world.device
        )
        self.wrapped = settings.strategy.prepare(self.model, world)
        settings.strategy.try_on = None
        self.model = settings.strategy.own_module(self.model)
        settings.strategy.bind(self.optimizer)
        if isinstance(self.criterion, nn.Module):
            self.criterion.to(world.device)
        self.forward = Forward(runner, self.wrapped, world.device, self.criterion, reporter.line)
        slices = settings.strategy.slices(world)
        self.rules = {
            name: loss_rule(self.criterion, feed, runner, slices)
            for name, feed in self.feeds.items()
        }
        for name, rule in self.rules.items():
            rule.note = reporter.line
            if self.feeds[name] not in self.trained:
                rule.check = None  # the criterion is looked at in training
        self.schedule = Schedule(settings.scheduler)
        self.stream = settings.strategy.stream(world)
        counts = settings.strategy.counts(world)
        self.metrics = {
            name: LoaderMetrics(
                settings.metrics, world, trains=feed in self.trained, counts=counts, slices=slices
            )
            for name, feed in self.feeds.items()
        }
        together = None if settings.strategy.alone else world
        self.rows = {
            feed.name: CountedRows(feed, runner.rows_of, together, counts)
            for feed in self.trained
            if feed.own_collate
        }
        self._step_hooks = overridden(settings.callbacks, "on_step_end")
        self.captured = captured_steps(self, bool(self._step_hooks))
        self.logged = Logged(world)
        self.profile = None
        if settings.profile is not None and settings.logdir is not None:
            from allhands.runner.profile import Profile

            self.profile = Profile(
                settings.profile, settings.logdir / "profile", world, reporter.line
            )
        self.checkpoints = TrainingCheckpoints(self)
        saves = settings.logdir is not None
        minutes = settings.save_minutes
        # Ctrl-C reaches the caller, who passes it on and waits for what is handed back.
        interrupts = (signal.SIGINT,) if handback.arrived is not None else ()
        self.agreement = Agreement(
            world,
            minutes * 60 if minutes is not None else None,
            (*SIGNALS, *interrupts) if saves else interrupts,
        )

    def stop(self, reason: str, now: bool = False) -> None:
        """End the training; to be called on every rank, or on none.

        Args:
            reason: is printed.
            now: after the current optimizer step, and not after the current epoch. The unfinished
                epoch is not evaluated and not in the history; with a logdir, a checkpoint is saved
                from which it can go on.
        """
        self._stop_reason = reason
        self._stop_now = now

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
        self.logged.add(name, value, count)

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
        if self.position is None or self.measuring is None:
            raise UserError(
                "save_checkpoint() is for on_step_end; at the end of every epoch a checkpoint is "
                "saved anyway"
            )
        hook_calls.together(("saving a checkpoint after optimizer step", self.step))
        self.checkpoints.save(self.position)

    def run(self) -> History:
        """Train, and give back the history. The user's own random generators are left as they were
        found.

        Raises:
            SystemExit: SIGTERM or SIGUSR1 came; all ranks have saved a checkpoint at the same step.
                The code is 128 plus the signal's number.
        """
        settings = self.settings
        with (
            preserved_generators(),
            self.agreement,
            recomputing(self),
            compiling(self),
            running(self),
        ):
            peak.start(self.world)
            self.checkpoints.restore()
            schedule_note = self._check_schedule()
            settings.strategy.begin(self.optimizer, self.step)
            if self.captured is not None:
                self.captured.begin()
            self.checkpoints.open()
            loggers = Loggers(
                settings.logdir if self.world.rank == 0 else None,
                len(self.history["epoch"]),
                self.step or None,
            )
            announce(self, schedule_note)
            self.agreement.begin(self.step)
            try:
                where = self._train(loggers)
            except BaseException:
                self.checkpoints.close(failed=True)
                raise
            finally:
                if self.captured is not None:
                    self.captured.finish()
                if self.profile is not None:
                    self.profile.close()
                if self.passes is not None:
                    self.passes.close()
                for feed in self.feeds.values():
                    feed.close()
                loggers.close()
                self.reporter.close()
            settings.strategy.finish()
            if self._signal == signal.SIGINT:
                saved = (
                    f"; saved in {settings.logdir}, go on with resume='auto'"
                    if settings.logdir is not None
                    else ""
                )
                self.checkpoints.close()
                self.reporter.line(
                    f"interrupted {where}: the model and the optimizer are as that left them{saved}"
                )
                return self.history
            if self._signal:
                self._leave_for_signal(where)
            self.reporter.line(peak.said(self.world))
            if settings.load_best_on_end:
                self._load_best()
            self.checkpoints.close()
        return self.history

    def _check_schedule(self) -> str:
        """A line for a schedule whose length is not the training's; see `Schedule.check_length`."""
        if self._limit or self.settings.cut_short:
            return ""  # a trial, which is shorter than the training
        lengths = [self.steps_of_epoch(feed) for feed in self.trained]
        steps = None if None in lengths else self.num_epochs * sum(lengths)  # type: ignore[arg-type]
        return self.schedule.check_length(steps, self.num_epochs, self.step, self.epoch)

    def _train(self, loggers: Loggers) -> str:
        """Run the epochs; says where the training ended."""
        run_hooks(self.settings.callbacks, "on_train_start", self)
        try:
            while self.epoch < self.num_epochs and self._stop_reason is None and not self._signal:
                self._run_epoch(loggers)
            where = f"after epoch {self.epoch}"
        except _Left:
            where = f"after optimizer step {self.step}, in epoch {self.epoch + 1}"
            self._set_mode(training=False)
            # the model that is handed back is one for all ranks
            self.settings.strategy.sync_buffers()
        if self._signal:
            return where
        run_hooks(self.settings.callbacks, "on_train_end", self)
        if self._stop_reason is not None:
            self.reporter.line(f"stopped {where}: {self._stop_reason}")
        return where

    def _set_mode(self, training: bool) -> None:
        if set_mode(self.optimizer, training) and self.world.world_size > 1:
            self.settings.strategy.updated()

    def _leave_for_signal(self, where: str) -> None:
        name = signal.Signals(self._signal).name
        self.checkpoints.close()
        self.reporter.line(
            f"stopped by {name} {where}: saved in {self.settings.logdir}; go on with resume='auto'"
        )
        requeue_if_asked(self.world, self.reporter.line)
        self.reporter.close()
        raise SystemExit(128 + self._signal)

    # ------------------------------------------------------------------ one epoch

    def _run_epoch(self, loggers: Loggers) -> None:
        started = time.perf_counter()
        resumed = self.position is not None
        if self.position is None:
            self.position = Position(rates=learning_rates(self.optimizer))
            # Dropout in this process: other draws in each epoch and on each rank, repeated when the
            # run is.
            seed_everything(derive_seed(self.settings.seed, "train", self.epoch, self.stream))
            run_hooks(self.settings.callbacks, "on_epoch_start", self)
        position, number = self.position, self.epoch + 1
        earlier = position.seconds
        for feed in self.trained:
            if feed.name not in position.done and not position.evaluating:
                position.finish(
                    feed.name,
                    self._train_epoch(feed, position, resumed, loggers, started - earlier),
                )
                resumed = False
        strategy = self.settings.strategy
        if not position.evaluating:
            self._set_mode(training=False)
            calls.note(("comparing weights after epoch", number))
            strategy.sync_buffers()
            strategy.check_equal(f"after epoch {number}")
        position.evaluating = True
        values = dict(position.done)
        evaluated = {name: feed for name, feed in self.feeds.items() if feed not in self.trained}
        if evaluated:
            run_hooks(self.settings.callbacks, "on_evaluate_start", self)
        for name, feed in evaluated.items():
            seed_everything(
                derive_seed(self.settings.seed, "evaluate", name, self.epoch, self.stream)
            )
            position.seconds = time.perf_counter() - started + earlier
            values[name] = self._evaluate_epoch(feed, number)
        if evaluated:
            run_hooks(self.settings.callbacks, "on_evaluate_end", self)
        self.epoch = number
        self.position = None
        self._record(values, position.rates, time.perf_counter() - started + earlier)
        improved = self._update_best(values)
        run_hooks(self.settings.callbacks, "on_epoch_end", self)
        if self.schedule.each_epoch:
            self.schedule.step(values[self.valid_loader][self.settings.main_metric])
        if self.settings.logdir is not None:
            self.checkpoints.save(None, improved, values)
            self.agreement.saved()
            self._signal = self.agreement.ask(self.step + self._evaluated).signal
        elif improved and self.settings.load_best_on_end:
            self._best_state = strategy.copy_weights(self.model)
        loggers.epoch(number, self.step, values, position.rates, self.history["seconds"][-1])
        place, seconds = f"{self.epoch}/{self.num_epochs}", self.history["seconds"][-1]
        report_epoch(self.reporter, "epoch", place, values, position.rates[0], seconds, improved)

    def _train_epoch(
        self, feed: Feed, position: Position, resumed: bool, loggers: Loggers, since: float
    ) -> dict[str, float]:
        settings, world, reporter, agreement = (
            self.settings,
            self.world,
            self.reporter,
            self.agreement,
        )
        number = self.epoch + 1
        self.measuring = metrics = self.metrics[feed.name]
        metrics.start(f"epoch {number}")
        self.logged.start()
        settings.strategy.go_on()
        self._set_mode(training=True)
        self.model.train()
        self.wrapped.train()
        take = (ClosureStep if takes_closure(self.optimizer) else OptimizerStep)(
            self.model.parameters(),
            self.optimizer,
            self.rules[feed.name],
            settings.strategy,
            world,
            self.precision,
            self.forward,
            metrics.observe,
            self.forward.target_of,
            settings.clip_norm,
        )
        if not self._looked and world.world_size > 1:
            self._looked, take.before_first_update = True, self._look
        profile = self.profile
        if profile is not None:
            take.label = profile.label
        total_steps = self.steps_of_epoch(feed)
        check_every, save_every = settings.strategy.check_weights_every, settings.save_every or 0
        steps_hooked = bool(self._step_hooks) or self.schedule.each_step
        together, captured = world.world_size > 1, self.captured
        if captured is not None:
            captured.look()
        pace, rows = Pace(), self.rows.get(feed.name)
        first = self.step - position.steps
        next_log = self.step + settings.log_every
        next_check = self.step + check_every if check_every else math.inf
        next_save = (self.step // save_every + 1) * save_every if save_every else math.inf
        if resumed:
            self.checkpoints.continue_epoch(position)
        for batches, counts, total, idle in self._steps_of(feed, position):
            if together:
                calls.note(("optimizer step", self.step + 1))
            if captured is None:
                take(batches, counts, total, idle)
            else:
                captured(take, batches, counts, total, idle)
            self.step = step = self.step + 1
            if profile is not None:
                profile.step()
            samples = total if rows is None else rows.samples
            position.samples += samples
            if self.passes is not None:
                self.passes.took(feed, samples)
            position.steps += 1
            if steps_hooked:
                self._after_step()
                if captured is not None and self._step_hooks:
                    captured.look()
            if reporter.shows_bar and step - first >= pace.next_look and pace.due(step - first):
                reporter.progress(
                    f"{number}/{self.num_epochs} {feed.name}",
                    step - first,
                    total_steps,
                    metrics.running_loss(),
                )
            if step >= next_log:
                next_log = step + settings.log_every
                metrics.check_finite()
                # On a pipeline's last stage alone, and rank 0 is the first.
                if settings.strategy.drives:
                    metrics.share_loss()
                if loggers.active:
                    loggers.step(step, metrics.running_loss(), learning_rates(self.optimizer))
            if step >= next_check:
                next_check = step + check_every
                calls.note("comparing weights")
                settings.strategy.check_equal(f"at step {step}")
            if step >= next_save:
                next_save = step + save_every
                position.seconds = time.perf_counter() - since
                self._save_here()
            if step + self._evaluated >= agreement.next:
                position.seconds = time.perf_counter() - since
                self._agree()
        metrics.check_finite()
        self.measuring = None
        values = metrics.result() | settings.strategy.epoch_values()
        return values | self.logged.means(taken=values) if settings.callbacks else values

    def _look(self, took_part: bool, loss: float | None) -> None:
        """Before the first update, on all ranks: what would make the result another one without a
        word."""
        check_buffers_equal(self.model, self.world, took_part)
        self.settings.strategy.check_first_loss(loss)

    def _steps_of(self, feed: Feed, position: Position) -> Iterator[Any]:
        """The steps of the epoch that are left."""

        def steps_of(epoch: int, skip: int) -> Iterator[Any]:
            steps = feed.epoch(epoch, skip)
            return self.rows[feed.name](steps) if feed.name in self.rows else steps

        if self.passes is not None:
            number = self.steps_of_epoch(feed)
            assert number is not None
            steps = self.passes.steps(feed, steps_of, max(0, number - position.steps))
        else:
            steps = steps_of(0 if self.settings.overfit else self.epoch, position.samples)
            steps = (
                itertools.islice(steps, max(0, self._limit - position.steps))
                if self._limit
                else steps
            )
        return steps if self.profile is None else self.profile.reading(steps)

    def steps_of_epoch(self, feed: Feed) -> int | None:
        """Optimizer steps of an epoch with a loader that is trained on; None when only reading
        tells."""
        steps = feed.num_steps if self.passes is None else self.settings.steps_per_epoch
        return min(steps, self._limit) if self._limit and steps else steps

    def _after_step(self) -> None:
        if self.schedule.each_step:
            self.schedule.step()
        if self._step_hooks:
            run_hooks(self._step_hooks, "on_step_end", self)
        if self._stop_now:
            if self.settings.logdir is not None:
                self._save_here()
            raise _Left

    def _save_here(self) -> None:
        if self.measuring is not None:
            # weights that a NaN has reached must not become the newest checkpoint
            self.measuring.check_finite()
        self.checkpoints.save(self.position)
        self.agreement.saved()

    def _agree(self) -> None:
        """Do what the ranks decide together: save, or save and leave."""
        decision = self.agreement.ask(self.step + self._evaluated)
        within_evaluation = self.position is not None and self.position.evaluating
        if decision.save or decision.signal:
            # A checkpoint, and what is handed back, hold the weights of the training.
            if within_evaluation:
                run_hooks(self.settings.callbacks, "on_evaluate_end", self)
            if self.settings.logdir is not None:
                self._save_here()
        if decision.signal:
            self._signal = decision.signal
            raise _Left
        if decision.save and within_evaluation:
            run_hooks(self.settings.callbacks, "on_evaluate_start", self)

    def _evaluate_epoch(self, feed: Feed, number: int) -> dict[str, float]:
        steps: Iterator[Any] = feed.epoch(self.epoch)
        if self._limit:
            steps = itertools.islice(steps, self._limit)
        label = f"{number}/{self.num_epochs} {feed.name}"
        rule, metrics = self.rules[feed.name], self.metrics[feed.name]
        return evaluate_feed(
            feed,
            self._asked_between(steps),
            self.model,
            self.forward,
            rule,
            metrics,
            self.precision,
            self.reporter,
            label,
            self.settings.strategy,
        )

    def _asked_between(self, steps: Iterator[Any]) -> Iterator[Any]:
        """The steps of an evaluation, with the rounds of the agreement between them: a signal need
        not wait for its end."""
        if self.agreement.next == math.inf:
            yield from steps
            return
        for step in steps:
            yield step
            self._evaluated += 1
            if self.step + self._evaluated >= self.agreement.next:
                self._agree()

    # ------------------------------------------------------------------ what is remembered

    def _record(
        self, values: dict[str, dict[str, float]], rates: list[float], seconds: float
    ) -> None:
        row = {"epoch": self.epoch, "step": self.step, "lr": rates[0], "seconds": seconds}
        for key, value in row.items():
            self.history[key].append(value)
        for loader, metrics in values.items():
            for name, value in metrics.items():
                self.history.setdefault(loader, {}).setdefault(name, []).append(value)

    def _update_best(self, values: dict[str, dict[str, float]]) -> bool:
        value = values[self.valid_loader][self.settings.main_metric]
        better = self.settings.is_better(value, self.best)
        if better:
            self.best, self.best_epoch = value, self.epoch
        return better

    def _load_best(self) -> None:
        if self.best is None:
            return
        if self.checkpoints.folder is not None:
            self.checkpoints.wait()
            self.checkpoints.load_weights(self.checkpoints.folder / "best")
        elif self._best_state is not None:
            self.settings.strategy.restore_weights(self.model, self._best_state)
        if self.checkpoints.folder is not None or self._best_state is not None:
            self.reporter.line(f"loaded the weights of the best epoch, {self.best_epoch}")

    # ------------------------------------------------------------------ small things

    def _to_device(self) -> None:
        self.model.to(self.world.device)
        if self.optimizer.state:  # a state from earlier training follows its parameters
            self.optimizer.load_state_dict(self.optimizer.state_dict())
