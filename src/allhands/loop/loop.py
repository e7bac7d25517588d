"""`Loop`: the training of a user who writes the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allhands.checks import check_whole
from allhands.comm import calls
from allhands.data import Feed
from allhands.errors import UserError, kind_of
from allhands.launch import handback, worker
from allhands.loop.epoch import Batch, Epoch, Iteration
from allhands.loop.history import new_history
from allhands.loop.loggers import Loggers, prepare_logdir
from allhands.loop.loss_mean import LossMean
from allhands.loop.misuse import Misuse
from allhands.loop.model_groups import (
    called_models,
    check_own_steps,
    group_settings,
    named,
    place_others,
    untrained,
)
from allhands.loop.optimizer_group import OptimizerGroup
from allhands.loop.own_checkpoints import OwnCheckpoints
from allhands.loop.passes import DataPasses
from allhands.loop.passes_by_hand import PassesByHand
from allhands.loop.reporter import ConsoleReporter, ForwardingReporter, Reporter
from allhands.loop.reports import Reports
from allhands.loop.settings import Data, LoopSettings
from allhands.loop.step_function import StepFunction, rows_of
from allhands.loop.task import Objective, Task
from allhands.loop.trainable import check_trainable
from allhands.loop.workers import strategy_for
from allhands.step.modes import evaluation_mode
from allhands.strategies import Strategy
from allhands.world import current_world, finalize, init


class Loop(PassesByHand, Reports):
    """A training whose steps you write, exact on any number of workers.

    It runs in one process, and in each process that a launcher has started (``allhands launch``,
    torchrun, srun, mpirun, `allhands.spawn`)::

        loop = allhands.Loop(model=model, optimizer=optimizer, loaders={"train": train})

        def loss_of(batch):
            x, y = batch
            return F.cross_entropy(loop.model(x), y)

        for epoch in loop.epochs(10):
            for batch in epoch.train:
                loop.step(loss_of, batch)

    Args:
        model, optimizer, scheduler: of a training with one optimizer. A scheduler may be
            ``(scheduler, "step")`` or ``(scheduler, "epoch")``.
        models, optimizers, schedulers: dicts by name, instead of these. A model that no optimizer
            trains (a teacher, a moving average) is placed and saved too.
        loaders, datasets: as for `SupervisedRunner.train`; None where batches come from elsewhere.
        strategy: the name of a strategy or a `Strategy`; None is "ddp" with several workers.
        distributed: another word for `strategy`, that of `SupervisedRunner.train` and of messages.
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        precision: "fp32", "bf16" or "fp16".
        clip_norm: bound of the global gradient norm of each optimizer.
        accumulate: micro-batches in one optimizer step.
        logdir: folder for checkpoints, ``metrics.csv`` and TensorBoard files.
        resume: a checkpoint, or "auto" for the newest whole one in `logdir`.
        seed: decides sample order, dropout, `randn` and `rand`.
        save_every: iterations between two checkpoints within an epoch.
        save_minutes: minutes after which a checkpoint is due within an epoch.
        steps_per_epoch: end an epoch after so many iterations.
        step: how a step is taken, as for `SupervisedRunner.train`; "graph" captures step functions
            in CUDA graphs, which replay what they have asked the GPU for and nothing else.
        activation_checkpointing: as for `SupervisedRunner.train`.

    Attributes:
        world: the processes.
        models: the modules to call, by name.
        device: on which this rank computes.
        main: whether this is rank 0.
        epoch: finished epochs.
        global_step: iterations over all epochs.
        history: ``{"epoch": […], "step": […], "lr": […], "seconds": […], "train": {"loss": […]}}``.

    Raises:
        UserError: an argument cannot be honoured; the message names it and what to write instead.
    """

    level = True
    checkpoints: OwnCheckpoints

    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        models: Mapping[str, nn.Module] | None = None,
        optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
        schedulers: Mapping[str, Any] | None = None,
        loaders: Any = None,
        datasets: Any = None,
        strategy: str | Strategy | None = None,
        distributed: str | Strategy | None = None,
        device: str | None = None,
        precision: str = "fp32",
        clip_norm: float | None = None,
        accumulate: int = 1,
        logdir: str | Path | None = None,
        resume: str | Path | None = None,
        seed: int = 42,
        save_every: int | None = None,
        save_minutes: float | None = None,
        steps_per_epoch: int | None = None,
        step: str = "auto",
        activation_checkpointing: Any = False,
    ) -> None:
        given_models = named("model", model, models)
        self.several = models is not None or optimizers is not None
        self._optimizers = named("optimizer", optimizer, optimizers)
        self._schedulers = dict(schedulers or {})
        if scheduler is not None:
            self._schedulers["optimizer"] = scheduler
        self.container = nn.ModuleDict(given_models)
        settings = LoopSettings(
            model=self.container if self.several else given_models["model"],
            optimizer=next(iter(self._optimizers.values())),
            data=self.data_of(loaders, datasets),
            logdir=None if logdir is None else Path(logdir).expanduser().absolute(),
            resume=resume
            if resume in (None, "auto")
            else str(Path(resume).expanduser().absolute()),
            seed=seed,
            accumulate=accumulate,
            clip_norm=clip_norm,
            precision=precision,
            save_every=save_every,
            save_minutes=save_minutes,
            steps_per_epoch=steps_per_epoch,
            step=step,
            activation_checkpointing=activation_checkpointing,
        )
        if strategy is not None and distributed is not None:
            raise UserError("strategy= and distributed= are one argument; leave out one of them")
        before, world = current_world(), init(device=device)
        if before is None and world.environment == "alone":
            finalize()  # the caller has made no world and need not know of this one
        settings.strategy = strategy_for(strategy or distributed, world)
        check_own_steps(settings.strategy, world)
        self._parts = group_settings(
            settings, given_models, self._optimizers, self._schedulers, self.several
        )
        for part in self._parts.values():
            part.validate()
            check_trainable(part, world.world_size)
        prepare_logdir(settings.logdir)
        self.others = place_others(given_models, self._parts, world)
        self.history = new_history()
        self.registered: dict[str, tuple[Any, bool]] = {}
        self._functions: dict[tuple[Any, str], tuple[StepFunction, Objective]] = {}
        self._stepped: set[str] = set()
        self._begun = {}
        reporter: Reporter = ForwardingReporter(False)  # where `allhands.spawn` has started it
        if handback.arrived is None:
            reporter = ConsoleReporter(False)
        if world.rank:
            reporter = Reporter()
        task = Task(
            None, None, rows_of, own_calls="the step function is your own", shows_gradients=True
        )
        super().__init__(settings, world, reporter, task, OwnCheckpoints)
        if any(group.exchange.passes is not None for group in self.groups.values()):
            raise UserError(
                f"allhands.Loop(strategy={settings.strategy.name!r}): a pipeline runs the passes "
                "of a step in its own order, in which a step function cannot be called; use "
                "SupervisedRunner"
            )
        self.device, self.main = world.device, world.rank == 0
        self.measures = {
            feed.name: LossMean(world, trains=True, counts=self.counts) for feed in self.trained
        }
        self._without_loader = LossMean(world, trains=True, counts=self.counts)
        self.models = called_models(given_models, self.groups)
        #: Models that stay as they are while parts of copies are trained.
        self.untrained = untrained(given_models, self.models)
        self.misuse = Misuse(self)

    def data_of(self, loaders: Any, datasets: Any) -> Data:
        """The data, as the user gave it."""
        return Data(loaders, datasets, optional=True)

    def parts(self, settings: LoopSettings) -> dict[str, LoopSettings]:
        return self._parts

    @property
    def model(self) -> nn.Module:
        """The module to call in a step function."""
        if self.several:
            names = ", ".join(f"loop.models[{name!r}]" for name in self.models)
            raise UserError(f"the loop has several models; write {names}")
        return self.models["model"]

    # ------------------------------------------------------------------ epochs and steps

    def epochs(self, number: int) -> Iterator[Epoch]:  # type: ignore[override]
        """The epochs that are left of `number`. After the body of each, a checkpoint is saved.

        Raises:
            SystemExit: a signal ended the training, after a checkpoint was saved.
        """
        check_whole("loop.epochs(number)", number)
        self.num_epochs = number
        with self._running():
            for _ in super().epochs():
                epoch = Epoch(self, self.epoch + 1)
                self._stepped.clear()
                yield epoch
                rates, seconds = self._end(epoch)
                self._report("epoch", self.epoch, number, epoch.values, rates, seconds)

    def steps(self, number: int) -> Iterator[Iteration]:
        """The iterations that are left of `number`, over as many passes over the data as it takes;
        without loaders, iterations of your own.

        Raises:
            SystemExit: a signal ended the training, after a checkpoint was saved.
        """
        check_whole("loop.steps(number)", number)
        self.num_epochs, self.settings.steps_per_epoch = 1, number
        if self.passes is None:
            self.passes = DataPasses()
        if len(self.trained) > 1:
            raise UserError(
                f"loop.steps with the loaders {', '.join(feed.name for feed in self.trained)}; "
                "pass one whose name begins with 'train'"
            )
        for name, group in self.groups.items():
            group.schedule.count_steps(name)
        with self._running():
            for position in super().epochs():
                measure = self._without_loader
                batches: Iterator[Any]
                if self.trained:
                    measure = self.measures[self.trained[0].name]
                    batches = (Batch(self, one) for one in self.train(self.trained[0], measure))
                else:
                    batches = self._own_iterations(position, number)
                for batch in batches:
                    self.batch = batch
                    step = Iteration(self, self.global_step + 1, batch)
                    yield step
                    self.end_iteration()
                    step.close()
                    if self.stop_reason is not None:
                        break
                self._end(Epoch(self, 1))

    def _own_iterations(self, position: Any, number: int) -> Iterator[None]:
        self.begin_steps(self._without_loader)
        for _ in self.due(iter(range(position.steps, number))):
            yield None
            self.global_step += 1
            position.steps += 1

    def _end(self, epoch: Epoch) -> tuple[list[float], float]:
        """The body of an epoch is through; the learning rates with which it began, and how long it
        took."""
        assert self.position is not None
        unused = [name for name in self.groups if name not in self._stepped]
        if self._stepped and unused:
            raise UserError(
                f"no step used the optimizer '{unused[0]}' in {self.unit} {self.epoch + 1}; write "
                f"loop.step(…, batch, optimizer={unused[0]!r}), or leave it out"
            )
        for group in self.groups.values():
            group.schedule.check_metric(epoch.metric)
        if not self.position.evaluating:
            self.end_steps()
        rates, seconds = self.position.rates, self.seconds
        self.end_epoch()
        if epoch.values:
            self._record(self.epoch, epoch.values, rates, seconds)
        self.follow_schedules("epoch", epoch.metric)
        self.save_epoch(epoch.values)
        return rates, seconds

    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._loggers is not None:
            raise UserError(
                "the loop's training has ended; call loop.epochs(…) or loop.steps(…) once, and "
                "make a new allhands.Loop for another training"
            )
        with calls.watch(self.world, worker.fail), self, self.misuse:
            self._loggers = Loggers(
                self.settings.logdir if self.main else None,
                len(self.history["epoch"]),
                self.global_step or None,
            )
            try:
                yield
            finally:
                self._loggers.close()
            if self.stop_reason is not None:
                self.reporter.line(f"stopped {self.where}: {self.stop_reason}")
            self.finish()
            for group in self.groups.values():
                group.state.give_back(keep=True)

    def stop(self, reason: str) -> None:  # type: ignore[override]
        """End the training after the current epoch, or iteration of `steps`; to be called on every
        rank. The model holds its weights then, which it may not after a ``break``.

        Args:
            reason: is printed.
        """
        self.stop_reason = reason

    # ------------------------------------------------------------------ one step

    def step(  # type: ignore[override]
        self,
        fn: Callable[[Any], Any] | None = None,
        batch: Any = None,
        optimizer: str | None = None,
        again: bool = False,
    ) -> None:
        """Call a step function on this rank's micro-batches, and take a step of the optimizer with
        the gradient of the global batch. Without a function, take the step of what `backward` has
        added up.

        Args:
            fn: takes a micro-batch to its loss: one number, the mean over its samples; or ``(sum,
                count)``, what is divided by what; or a dict with a "loss" of either kind, whose
                further values are means to be reported. It is called on two parts of its first
                batch as well, to find out whether the loss is a mean over the samples.
            batch: of ``epoch.train``; or tensors, or a tree of them, of this rank's own.
            optimizer: its name, where there are several.
            again: the batch was used by this optimizer already.

        Raises:
            UserError: what `fn` gave is no loss; a wrong name; a batch that was used already.
        """
        name = self._group_named(optimizer)
        if fn is None:
            self.end_by_hand(name)
            return
        if not isinstance(batch, Batch):
            batch = Batch.of(self, batch)
        if name in batch.used and not again:
            raise UserError(
                f"the batch was used for a step of '{name}' already; take the next one, or write "
                "loop.step(…, again=True) where it is meant"
            )
        batch.used.add(name)
        self.misuse.agree(f"loop.step of '{name}'")
        self._stepped.add(name)
        function, objective = self._function(fn, name)
        if function.fn is not fn and self.groups[name].captured is not None:
            raise UserError(
                f"step='graph' replays {function.where} as it was captured, and another one was "
                "made; define it once, before the loop"
            )
        function.fn = fn
        self._drawing = batch.iteration, batch.steps
        batch.steps += 1
        step = batch.parts, batch.counts, batch.total, False
        with self.misuse.within, self.alone(self.groups[name]):
            super().step(objective, step, name)

    def alone(self, group: OptimizerGroup) -> AbstractContextManager[None]:
        """Within, no parameter of another group than this one needs a gradient."""
        if len(self.groups) == 1:
            return nullcontext()
        return group.alone([other for other in self.groups.values() if other is not group])

    def _function(self, fn: Any, name: str) -> tuple[StepFunction, Objective]:
        # A function that is made anew in each iteration has one code.
        key = getattr(fn, "__code__", None) or id(fn), name
        if key not in self._functions:
            function = StepFunction(self, fn, StepFunction.name_of(fn))
            function.rule.note = self.reporter.line
            self._functions[key] = function, function.objective(partial(self._observe, name))
        return self._functions[key]

    def _group_named(self, name: str | None) -> str:
        if name is None and len(self.groups) == 1:
            return self._first
        if name not in self.groups:
            raise UserError(
                f"loop.step(…, optimizer={name!r}); the optimizers are {', '.join(self.groups)}"
            )
        return name

    @property
    def evaluated_feeds(self) -> list[Feed]:
        """The loaders that are not trained on."""
        return [feed for feed in self.feeds.values() if feed not in self.trained]

    @contextmanager
    def evaluation_state(self) -> Iterator[None]:
        """Within, all models are as they are evaluated: equal on all ranks, in evaluation mode,
        without gradients. All ranks call it together."""
        position = self.position
        assert position is not None
        through = all(feed.name in position.done for feed in self.trained) and bool(position.done)
        if not position.evaluating and through:
            self.end_steps()
        between = nullcontext() if position.evaluating else self.equal_between_steps()
        with between:
            with evaluation_mode(self.container), torch.no_grad(), self.precision.autocast():
                yield
            for group in self.groups.values():
                group.placement.evaluated()

    # ------------------------------------------------------------------ what is saved

    def register(self, name: str, value: Any, each_rank: bool = False) -> None:
        """Save an object with every checkpoint, and load it when a training goes on.

        Args:
            name: under which it is saved.
            value: has ``state_dict()`` and ``load_state_dict(state)``, made of numbers, strings,
                tensors, lists and dicts.
            each_rank: every rank has a state of its own (a replay buffer); it goes on with the same
                number of workers only.

        Raises:
            UserError: it has no state, or the training has begun.
        """
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise UserError(
                f"loop.register({name!r}, {kind_of(value)}): it needs state_dict() and "
                "load_state_dict(state)"
            )
        if self.position is not None or self.epoch:
            raise UserError(f"loop.register({name!r}, …) comes before the first epoch or step")
        self.registered[name] = value, each_rank
