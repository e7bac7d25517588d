"""The training loop: epochs, evaluation, history, checkpoints. The same code in one process and on every worker."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.comm import all_gather_text
from allhands.data import Feed, build_feeds, derive_seed, preserved_generators, seed_everything
from allhands.errors import UserError
from allhands.runner import checkpoint
from allhands.runner.callbacks import overridden
from allhands.runner.evaluation import Forward, evaluate_feed, loss_rule
from allhands.runner.loggers import Loggers, set_earlier_run_aside
from allhands.runner.metrics import LoaderMetrics
from allhands.runner.reporter import Pace, Reporter
from allhands.runner.schedule import Schedule, learning_rates
from allhands.runner.settings import TrainSettings
from allhands.step import OptimizerStep, Precision
from allhands.world import World

if TYPE_CHECKING:
    from allhands.runner.supervised import SupervisedRunner

History = dict[str, Any]


class Training:
    """One call of `SupervisedRunner.train`, on one rank.

    Attributes:
        epoch: finished epochs.
        step: optimizer steps taken, over all epochs.
        history: ``{"epoch": [1, 2, …], "step": […], "lr": […], "seconds": […], "train": {"loss": […], …}, "valid": {…}}``.
    """

    def __init__(self, runner: SupervisedRunner, settings: TrainSettings, world: World, reporter: Reporter) -> None:
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
        self._stop_reason: str | None = None
        self._best_state: dict[str, torch.Tensor] | None = None
        self._limit = 1 if settings.overfit else 3 if settings.check else None

        settings.strategy.check(world)
        self.feeds = build_feeds(
            settings.data.sources(settings.seed),
            world,
            settings.seed,
            settings.accumulate,
            settings.data.same_everywhere,
        )
        self.trained = [feed for name, feed in self.feeds.items() if name.startswith("train")]
        self.valid_loader = self._choose_valid_loader()
        self._to_device()
        self.precision = Precision(settings.precision, world.device)
        self.wrapped = settings.strategy.prepare(self.model, world)
        if isinstance(self.criterion, nn.Module):
            self.criterion.to(world.device)
        self.forward = Forward(runner, self.wrapped, world.device)
        self.rules = {name: loss_rule(self.criterion, feed, runner) for name, feed in self.feeds.items()}
        self.schedule = Schedule(settings.scheduler)
        self.metrics = {
            name: LoaderMetrics(settings.metrics, world, trains=feed in self.trained) for name, feed in self.feeds.items()
        }
        self._step_hooks = overridden(settings.callbacks, "on_step_end")

    def stop(self, reason: str) -> None:
        """End the training after the current epoch; to be called on every rank, or on none."""
        self._stop_reason = reason

    def run(self) -> History:
        """Train, and give back the history. The user's own random generators are left as they were found."""
        settings = self.settings
        with preserved_generators():
            self._restore()
            loggers = Loggers(settings.logdir if self.world.rank == 0 else None, len(self.history["epoch"]))
            self._say_what_runs()
            try:
                self._hook("on_train_start")
                while self.epoch < self.num_epochs and self._stop_reason is None:
                    self._run_epoch(loggers)
                self._hook("on_train_end")
            finally:
                loggers.close()
                self.reporter.close()
            if self._stop_reason is not None:
                self.reporter.line(f"stopped after epoch {self.epoch}: {self._stop_reason}")
            if settings.load_best_on_end:
                self._load_best()
        return self.history

    # ------------------------------------------------------------------ one epoch

    def _run_epoch(self, loggers: Loggers) -> None:
        started = time.perf_counter()
        number = self.epoch + 1
        values: dict[str, dict[str, float]] = {}
        rates = learning_rates(self.optimizer)
        # Dropout and augmentation in this process: other draws in each epoch and on each rank, repeated when the run is.
        seed_everything(derive_seed(self.settings.seed, "train", self.epoch, self.world.rank))
        self._hook("on_epoch_start")
        for feed in self.trained:
            values[feed.name] = self._train_epoch(feed, number, loggers)
        strategy = self.settings.strategy
        strategy.sync_buffers()
        strategy.check_equal(f"after epoch {number}")
        for name, feed in self.feeds.items():
            if feed not in self.trained:
                seed_everything(derive_seed(self.settings.seed, "evaluate", name, self.epoch, self.world.rank))
                values[name] = self._evaluate_epoch(feed, number)
        self.epoch = number
        self._record(values, rates, time.perf_counter() - started)
        improved = self._update_best(values)
        self._hook("on_epoch_end")
        if self.schedule.each_epoch:
            self.schedule.step(values[self.valid_loader][self.settings.main_metric])
        if self.settings.logdir is not None:
            if self.world.rank == 0:
                summary = {
                    "epoch": self.epoch,
                    "step": self.step,
                    "world_size": self.world.world_size,
                    "metrics": values,
                }
                checkpoint.save(self.settings.logdir / "checkpoints", self.state_dict(), summary, improved)
        elif improved and self.settings.load_best_on_end:
            self._best_state = {key: value.detach().cpu().clone() for key, value in self.model.state_dict().items()}
        loggers.epoch(number, self.step, values, rates, self.history["seconds"][-1])
        self._report(values, rates, improved)

    def _train_epoch(self, feed: Feed, number: int, loggers: Loggers) -> dict[str, float]:
        settings, world, reporter = self.settings, self.world, self.reporter
        metrics = self.metrics[feed.name]
        metrics.start(f"epoch {number}")
        self.model.train()
        self.wrapped.train()
        take = OptimizerStep(
            self.model.parameters(), self.optimizer, self.rules[feed.name], settings.strategy, world, self.precision,
            self.forward, metrics.observe, self.forward.target_of, settings.clip_norm,
        )  # fmt: skip
        total_steps = min(feed.num_steps, self._limit) if self._limit and feed.num_steps else feed.num_steps
        check_every = settings.strategy.check_weights_every
        steps_hooked = bool(self._step_hooks) or self.schedule.each_step
        pace = Pace()
        first = self.step
        next_log = self.step + settings.log_every
        next_check = self.step + check_every if check_every else math.inf
        for batches, counts, total, idle in self._limited(feed.epoch(0 if settings.overfit else self.epoch)):
            take(batches, counts, total, idle)
            self.step = step = self.step + 1
            if steps_hooked:
                self._after_step()
            if step - first >= pace.next_look and pace.due(step - first):
                reporter.progress(f"{number}/{self.num_epochs} {feed.name}", step - first, total_steps, metrics.running_loss())
            if step >= next_log:
                next_log = step + settings.log_every
                metrics.check_finite()
                if loggers.active:
                    loggers.step(step, metrics.running_loss(), learning_rates(self.optimizer))
            if step >= next_check:
                next_check = step + check_every
                settings.strategy.check_equal(f"at step {step}")
        metrics.check_finite()
        return metrics.result()

    def _after_step(self) -> None:
        if self.schedule.each_step:
            self.schedule.step()
        for callback in self._step_hooks:
            callback.on_step_end(self)

    def _evaluate_epoch(self, feed: Feed, number: int) -> dict[str, float]:
        steps = self._limited(feed.epoch(self.epoch))
        label = f"{number}/{self.num_epochs} {feed.name}"
        rule, metrics = self.rules[feed.name], self.metrics[feed.name]
        return evaluate_feed(feed, steps, self.model, self.forward, rule, metrics, self.precision, self.reporter, label)

    def _limited(self, steps: Iterator[Any]) -> Iterator[Any]:
        return itertools.islice(steps, self._limit) if self._limit else steps

    # ------------------------------------------------------------------ what is remembered

    def _record(self, values: dict[str, dict[str, float]], rates: list[float], seconds: float) -> None:
        row = {"epoch": self.epoch, "step": self.step, "lr": rates[0], "seconds": seconds}
        for key, value in row.items():
            self.history[key].append(value)
        for loader, metrics in values.items():
            for name, value in metrics.items():
                self.history.setdefault(loader, {}).setdefault(name, []).append(value)

    def _update_best(self, values: dict[str, dict[str, float]]) -> bool:
        value = values[self.valid_loader][self.settings.main_metric]
        better = not math.isnan(value) and (
            self.best is None or (value < self.best if self.settings.minimize_metric else value > self.best)
        )
        if better:
            self.best, self.best_epoch = value, self.epoch
        return better

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "format": 1,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.schedule.state_dict(),
            "scaler": self.precision.scaler.state_dict() if self.precision.scaler is not None else None,
            "epoch": self.epoch,
            "step": self.step,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "history": copy.deepcopy(self.history),
            "callbacks": [callback.state_dict() for callback in self.settings.callbacks],
            "seed": self.settings.seed,
            "world_size": self.world.world_size,
        }

    def _restore(self) -> None:
        settings = self.settings
        state = None
        if settings.resume is None:
            if settings.logdir is not None and self.world.rank == 0:
                aside = set_earlier_run_aside(settings.logdir)
                if aside is not None:
                    self.reporter.line(f"the logdir held an earlier run, now in {aside}; write resume='auto' to go on with it")
        elif settings.resume == "auto":
            assert settings.logdir is not None
            found = checkpoint.newest(settings.logdir / "checkpoints")
            if found is None:
                self.reporter.line("resume='auto': no checkpoint in the logdir, starting anew")
            else:
                path, state, passed_over = found
                for text in passed_over:
                    self.reporter.line(f"passed over: {text}")
                self.reporter.line(f"resuming from {path}")
        else:
            state = checkpoint.load(Path(settings.resume))
            self.reporter.line(f"resuming from {settings.resume}")
        epochs = all_gather_text(str(state["epoch"] if state else 0), self.world)
        if len(set(epochs)) > 1:
            raise UserError(
                f"the ranks found different checkpoints (epochs {', '.join(epochs)} on ranks 0 to {len(epochs) - 1}); the logdir "
                "must be on a file system that all of them share"
            )
        if state is not None:
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        if len(state["callbacks"]) != len(self.settings.callbacks):
            raise UserError(
                f"resume: the checkpoint was written with {len(state['callbacks'])} callback(s) and this run has "
                f"{len(self.settings.callbacks)}; pass the same callbacks in the same order"
            )
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"resume: the checkpoint is of another model or optimizer: {error}") from None
        self.schedule.load_state_dict(state["scheduler"])
        if self.precision.scaler is not None and state["scaler"] is not None:
            self.precision.scaler.load_state_dict(state["scaler"])
        for callback, callback_state in zip(self.settings.callbacks, state["callbacks"], strict=True):
            callback.load_state_dict(callback_state)
        self.epoch, self.step = state["epoch"], state["step"]
        self.best, self.best_epoch = state["best"], state["best_epoch"]
        self.history = state["history"]
        if state["seed"] != self.settings.seed:
            self.reporter.line(
                f"note: the checkpoint was made with seed={state['seed']}, this run goes on with {self.settings.seed}"
            )

    def _load_best(self) -> None:
        if self.best is None:
            return
        if self.settings.logdir is not None:
            # Rank 0 has written it; the others may see the file only after it says so.
            all_gather_text("", self.world)
            self._best_state = checkpoint.load(self.settings.logdir / "checkpoints" / "best")["model"]
        if self._best_state is not None:
            self.model.load_state_dict(self._best_state)
            self.reporter.line(f"loaded the weights of the best epoch, {self.best_epoch}")

    # ------------------------------------------------------------------ small things

    def _hook(self, name: str) -> None:
        for callback in overridden(self.settings.callbacks, name):
            getattr(callback, name)(self)

    def _choose_valid_loader(self) -> str:
        if not self.trained:
            raise UserError(f"no loader's name begins with 'train'; given are: {', '.join(self.feeds)}")
        chosen = self.settings.valid_loader
        if chosen is None:
            others = [name for name in self.feeds if not name.startswith("train")]
            return "valid" if "valid" in self.feeds else others[0] if others else self.trained[0].name
        if chosen not in self.feeds:
            raise UserError(f"valid_loader={chosen!r} is not among the loaders; given are: {', '.join(self.feeds)}")
        return chosen

    def _to_device(self) -> None:
        self.model.to(self.world.device)
        if self.optimizer.state:  # a state from earlier training follows its parameters
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def _say_what_runs(self) -> None:
        world, feed = self.world, self.trained[0]
        where = f"{world.world_size} worker{'s' if world.world_size > 1 else ''} on {world.device.type}"
        if world.world_size > 1:
            where += f", {world.backend}"
        samples = f"{feed.num_samples:,} samples" if feed.num_samples is not None else "a stream of samples"
        steps = f", {feed.num_steps} steps an epoch" if feed.num_steps is not None else ""
        if feed.global_batch:
            parts = f"{feed.batch_size} a worker x {world.world_size}"
            parts += f" x {self.settings.accumulate} accumulated" if self.settings.accumulate > 1 else ""
            batch = f"global batch {feed.global_batch} ({parts})"
        else:
            batch = "batches made by the batch sampler"
        self.reporter.line(f"allhands: {self.settings.strategy.name}, {where}; {batch}; {samples}{steps}, {feed.kind}")
        if self.schedule.scheduler is not None:
            self.reporter.line(self.schedule.describe())

    def _report(self, values: dict[str, dict[str, float]], rates: list[float], improved: bool) -> None:
        header, cells = ["epoch"], [f"{self.epoch}/{self.num_epochs}"]
        for loader, metrics in values.items():
            for name, value in metrics.items():
                header.append(f"{loader} {name}")
                cells.append(f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.2e}")
        header += ["lr", "seconds", "best"]
        cells += [f"{rates[0]:.3g}", f"{self.history['seconds'][-1]:.2f}", "*" if improved else ""]
        self.reporter.row(header, cells)
