"""`BaseLoop`: the object on which every training by optimizer steps stands."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from allhands.comm import calls
from allhands.data import Feed, derive_seed, preserved_generators, seed_everything
from allhands.loop import peak
from allhands.loop.announce import announce
from allhands.loop.bound_loop import BoundLoop
from allhands.loop.compiling import compiling
from allhands.loop.generators import generator_states
from allhands.loop.lifecycle import TIME_OVER
from allhands.loop.loader_steps import LoaderSteps
from allhands.loop.logged import Logged
from allhands.loop.loop_checkpoints import LoopCheckpoints
from allhands.loop.loss_mean import LossMean
from allhands.loop.optimizer_group import OptimizerGroup
from allhands.loop.out_of_memory import what_takes_less
from allhands.loop.passes import DataPasses
from allhands.loop.position import Position
from allhands.loop.recomputing import recomputing
from allhands.loop.reporter import Reporter
from allhands.loop.schedule import learning_rates, length_of_training
from allhands.loop.settings import LoopSettings
from allhands.loop.task import Objective, Task
from allhands.loop.times import CHECKPOINTS, EVALUATION
from allhands.report.history import Values
from allhands.world import World


class BaseLoop(BoundLoop):
    """A training whose steps somebody else writes: the data's shares, exact optimizer steps,
    checkpoints, and what all ranks decide together.

    Args:
        settings, world, reporter: see `Lifecycle`.
        task: what is known of the steps.
        checkpoints: makes the checkpoints.
        epochs: in all, those of a resumed checkpoint included; None: until the last step.

    Attributes: see `GroupedLoop`.
    """

    checkpoints: LoopCheckpoints

    def __init__(
        self,
        settings: LoopSettings,
        world: World,
        reporter: Reporter,
        task: Task,
        checkpoints: Callable[[Any], LoopCheckpoints] = LoopCheckpoints,
        epochs: int | None = 0,
    ) -> None:
        self.num_epochs = epochs
        self.measure = None
        #: Evaluates between two steps, where that is due; `generators` are those of the training
        #: meanwhile.
        self.evaluate_between: Callable[[], None] | None = None
        self.generators = None
        by_steps = settings.steps_per_epoch is not None or (
            settings.max_steps is not None and settings.limit is None
        )
        self.passes = DataPasses() if by_steps and not settings.same_epoch else None
        self.begin_binding(settings, world, reporter, task)
        settings.check_one_loader([feed.name for feed in self.trained])
        self._first = next(iter(self.groups))
        self.logged = Logged(world)
        #: Criteria that are modules of their own, to be compiled where the model is.
        self.losses: list[Any] = []
        self._resumed, self._started = False, 0.0
        #: Bytes by rank, once the training has ended.
        self.peak_memory: list[int] = []
        self._saved = -1  # the step at which an evaluation between two steps was saved
        super().__init__(settings, world, reporter, checkpoints)
        self.profile = None
        if settings.profile is not None and settings.logdir is not None:
            from allhands.loop.profile import Profile

            self.profile = Profile(
                settings.profile, settings.logdir / "profile", world, reporter.line
            )

    # ------------------------------------------------------------------ begin and end

    def contexts(self) -> Iterator[AbstractContextManager[Any]]:
        for group in self.groups.values():
            yield group.precision.of_calls(group.model, self.reporter.line)
            yield recomputing(group)
            left = (lambda: self._left_of(self._length()[0])) if len(self.groups) == 1 else None
            yield compiling(group, self.losses, self.reporter.line, left)

    def _length(self) -> tuple[int | None, int | None]:
        lengths = [self.steps_of_epoch(feed) for feed in self.trained]
        whole = None if None in lengths else sum(lengths)  # type: ignore[arg-type]
        return length_of_training(whole, self.num_epochs, self.settings.max_steps)

    def check_schedule(self) -> str:
        settings = self.settings
        if settings.limit or settings.cut_short or not self.trained:
            return ""  # a trial, which is shorter than the training
        steps, epochs = self._length()
        notes = [
            group.schedule.check_length(steps, epochs, self.global_step, self.epoch)
            for group in self.groups.values()
        ]
        return "\n".join(filter(None, notes))

    def begin(self) -> None:
        peak.start(self.world)
        for group in self.groups.values():
            group.begin(self.global_step)
        self._resumed = self.position is not None

    def announce(self, note: str) -> None:
        announce(self, note)

    def release(self) -> None:
        self.forecast.close()
        for group in self.groups.values():
            group.close()
        if self.profile is not None:
            self.profile.close()
        self._close_feeds()

    def end(self) -> None:
        if self.position is not None:
            self.unit(self._make_equal_in_the_end)
        for group in self.groups.values():
            group.exchange.finish()
        if not self.signal:
            self.peak_memory = self.unit(lambda: peak.by_ranks(self.world))
            self.reporter.line(peak.in_words(self.peak_memory, self.world))

    def _make_equal_in_the_end(self) -> None:
        for group in self.groups.values():
            group.set_mode(training=False)
            # the model that is handed back is one for all ranks
            group.state.sync_buffers()
            if group.replicas is not None:
                group.state.collect()

    def check_finite(self) -> None:
        if self.measure is not None:
            self.unit(self.measure.check_finite)

    # ------------------------------------------------------------------ epochs

    def epochs(self) -> Iterator[Position]:
        """The epochs that are left. After each, `end_epoch` must have been called.

        Raises:
            TrainingStopped: the training ends within an epoch.
        """
        while self.num_epochs is None or self.epoch < self.num_epochs:
            if self.position is None:
                if self.ended:
                    break
                self.position = Position(rates=learning_rates(self.optimizer))
                # Dropout in this process: other draws in each epoch and on each rank, repeated
                # when the run is.
                seed_everything(derive_seed(self.settings.seed, "train", self.epoch, self.stream))
            self._started = time.perf_counter() - self.position.seconds
            yield self.position

    @property
    def ended(self) -> bool:
        return super().ended or self._left_of(self.settings.max_steps) == 0

    @property
    def is_last(self) -> bool:
        """Whether no epoch follows, after the one that runs, if any."""
        epochs = self.epoch + (self.position is not None)
        return self.ended or (self.num_epochs is not None and epochs >= self.num_epochs)

    def _left_of(self, most: int | None, done: int | None = None) -> int | None:
        """What is left of `most` iterations; None where there is no such bound."""
        return None if most is None else max(0, most - (self.global_step if done is None else done))

    @property
    def seconds(self) -> float:
        """How long the epoch has taken so far, without what lies between an interruption and its
        resumption."""
        return time.perf_counter() - self._started

    def save(self, values: Values | None = None, best: bool = False) -> None:
        assert self.position is not None
        if values is not None:
            self._saved = self.global_step
        elif self._saved == self.global_step:
            return  # it was saved as it was evaluated
        self.position.seconds = self.seconds
        super().save(values, best)

    def end_epoch(self) -> None:
        """The epoch is trained and evaluated."""
        self.epoch += 1
        self.position, self._resumed = None, False

    def save_epoch(self, values: Values, best: bool = False) -> None:
        """After `end_epoch`: save a checkpoint, and ask the other ranks whether to go on.

        Args:
            values: the epoch's metrics by loader, for the checkpoint's summary.
            best: whether they are the best so far.
        """
        if self.settings.logdir is not None:
            self.unit(lambda: self._save_between_epochs(best, values))
            self.agreement.saved()
            decision = self.ask()
            self.signal = decision.signal
            if decision.over:
                self.stop(TIME_OVER)

    def _save_between_epochs(self, best: bool, values: Values) -> None:
        with self.times.of(CHECKPOINTS):
            self.checkpoints.save(None, best, values)

    # ------------------------------------------------------------------ the steps of an epoch

    def train(self, feed: Feed, measure: LossMean) -> Iterator[Any]:
        """The batches that are left for this rank in the current epoch of a loader, as `step` takes
        them.

        Args:
            feed: the loader.
            measure: takes in the losses; on leaving, those of the whole epoch are in it.

        Raises:
            TrainingStopped: the training ends here.
        """
        self.begin_steps(measure)
        position = self.position
        assert position is not None
        rows = self._rows.get(feed.name)
        self._reading = LoaderSteps(self, feed, position)
        for batch in self.due(self._reading):
            self._open = feed, batch[2], rows
            yield batch
            if self._open is not None:
                self._count()  # no step was taken with it
        self.unit(measure.check_finite)
        self.measure = self._reading = None

    def begin_steps(self, measure: LossMean) -> None:
        """Steps follow, whose losses `measure` takes in."""
        position = self.position
        assert position is not None
        self.measure = measure
        if self.settings.evaluate_every is None:
            measure.where = f"{self.period} {self.epoch + 1}"
            self.start_measure(measure)
        else:  # the means are those since the last evaluation
            measure.where = f"{self.period} {self.epoch + 1}"
        self._steps.clear()
        self.train_groups()
        if self._resumed:
            self._resumed = False
            self.checkpoints.continue_epoch(position)

    def start_measure(self, measure: LossMean) -> None:
        """What was measured is told; the means of the steps that follow begin."""
        measure.start(measure.where)
        self.logged.start()
        if self.elastic is not None and not self._resumed:
            self.elastic.measures.forget()

    def due(self, iterations: Iterator[Any]) -> Iterator[Any]:
        """The same iterations, with what is due between two of them."""
        check_every, save_every = self.strategy.check_weights_every, self.settings.save_every or 0
        evaluate_every = self.settings.evaluate_every or 0
        step = self.global_step
        next_check = (step // check_every + 1) * check_every if check_every else math.inf
        next_save = (step // save_every + 1) * save_every if save_every else math.inf
        next_evaluation = (
            (step // evaluate_every + 1) * evaluate_every if evaluate_every else math.inf
        )
        assert self.position is not None
        if self.position.evaluating_between:  # a resumed evaluation
            self._evaluate_between()
            if self._stop_now:
                self.after_iteration()
        for iteration in iterations:
            yield iteration
            step = self.global_step
            if self.elastic is not None:
                self.elastic.leave_if_told()
            if step >= next_check:
                next_check = step + check_every
                self.unit(lambda: self._check_equal(f"at step {self.global_step}"))
            if step >= next_evaluation:
                next_evaluation = step + evaluate_every
                self._evaluate_between()
            if step >= next_save:
                next_save = step + save_every
                self.check_finite()
                self.save()
            if self._stop_now or step + self.evaluated >= self.agreement.next:
                self.after_iteration()

    def _check_equal(self, where: str) -> None:
        calls.note("comparing weights")
        for group in self.groups.values():
            group.exchange.check_equal(where)

    def _evaluate_between(self) -> None:
        """Evaluate between two steps; a checkpoint that is due meanwhile goes on here."""
        assert self.position is not None
        assert self.evaluate_between is not None
        self.check_finite()
        self.position.evaluating_between = True
        self.generators = generator_states()
        with preserved_generators(), self.equal_between_steps():
            self.evaluate_between()
        self.generators = None

    def step(self, objective: Objective, batch: Any, group: str | None = None) -> None:
        """Forward and backward passes, exchange, clipping, and the optimizer's update.

        Args:
            objective: what is computed.
            batch: of `train`.
            group: whose optimizer takes the step; None where there is one.
        """
        name = self._first if group is None else group
        own = self.groups[name]
        self.forecast.look(own, batch)
        try:
            if self.elastic is None:
                self.take_optimizer_step(objective, name, batch)
            else:
                self.elastic.step(lambda one: self.take_optimizer_step(objective, name, one), batch)
        except torch.OutOfMemoryError as error:
            error.add_note(what_takes_less(own.settings, batch, self.world, self.task))
            raise

    def take_optimizer_step(self, objective: Objective, name: str, batch: Any) -> None:
        """Take a step of the optimizer of this name."""
        own = self.groups[name]
        take = self._steps.get((id(objective), name))
        if take is None:
            take = self._steps[id(objective), name] = own.step_for(objective)
            if self.profile is not None:
                take.label = self.profile.label
            if self.elastic is not None:
                take.before_update = partial(self.elastic.before_update, take, own)
        if self.world.world_size > 1:
            calls.note(("optimizer step", self.global_step + 1))
        if own.replicas is not None:
            self.replica_steps.take(take, objective, own, batch)
        elif own.captured is None:
            take(*batch)
        else:
            own.captured(take, *batch)
        self.stepped(own)

    def stepped(self, group: OptimizerGroup) -> None:
        """An optimizer has taken a step."""
        if self._open is not None:
            self._count()
        if group.schedule.each_step:
            group.schedule.step()

    def _count(self) -> None:
        """An iteration is over, but for what the user does after its steps."""
        assert self._open is not None
        assert self.position is not None
        feed, total, rows = self._open
        self._open = None
        self.global_step += 1
        if self.profile is not None:
            self.profile.step()
        samples = total if rows is None else rows.samples
        self.position.samples += samples
        self.position.steps += 1
        if self.passes is not None:
            self.passes.took(feed, samples)

    def end_steps(self) -> None:
        """The loaders of the epoch that are trained on are through: what is evaluated and saved is
        equal on all ranks."""
        assert self.position is not None
        self.unit(self._make_equal_after_epoch)
        self.position.evaluating = True

    def _make_equal_after_epoch(self) -> None:
        number = self.epoch + 1
        for group in self.groups.values():
            calls.note(("comparing weights after epoch", number))
            group.make_equal(f"after {self.period} {number}")

    def evaluation(self, feed: Feed) -> Iterator[Any]:
        """The batches for this rank of a loader that is evaluated, in the current epoch.

        Raises:
            TrainingStopped: the training ends here.
        """
        assert self.position is not None
        seed_everything(
            derive_seed(self.settings.seed, "evaluate", feed.name, self.epoch, self.stream)
        )
        self.position.seconds = self.seconds
        steps = itertools.islice(feed.epoch(self.epoch), self.settings.limit)
        return self.times.over(EVALUATION, self.between(steps))

    def batches_left(self, feed: Feed, position: Position) -> Iterator[Any]:
        """The steps of the epoch that are left."""
        settings = self.settings

        def steps_of(epoch: int, skip: int) -> Iterator[Any]:
            steps = self.read(feed, epoch, skip)
            return self._rows[feed.name](steps) if feed.name in self._rows else steps

        if self.passes is None:
            steps = steps_of(0 if settings.same_epoch else self.epoch, position.samples)
        elif settings.steps_per_epoch is None:
            steps = self.passes.rest(feed, steps_of, bool(position.samples))
        else:
            steps = self.passes.steps(feed, steps_of)
        bounds = [
            self._left_of(settings.max_steps),
            self._left_of(settings.steps_per_epoch, position.steps) if self.passes else None,
            self._left_of(settings.limit, position.steps),
        ]
        left = min((bound for bound in bounds if bound is not None), default=None)
        if left is not None:
            steps = itertools.islice(steps, left)
        if self.settings.logdir is not None:
            steps = self.times.reading(steps)
        return steps if self.profile is None else self.profile.reading(steps)

    def steps_of_epoch(self, feed: Feed) -> int | None:
        """Iterations of an epoch with a loader that is trained on; None when only reading tells."""
        settings = self.settings
        steps = (self.passes and settings.steps_per_epoch) or feed.num_steps
        return min(steps, settings.limit) if settings.limit and steps else steps
