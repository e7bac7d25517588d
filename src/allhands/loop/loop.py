"""`Loop`: the training of a user who writes the steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from allhands.checks import check_whole
from allhands.comm import calls
from allhands.errors import UserError
from allhands.launch import handback, worker
from allhands.loop.epoch import Batch, Epoch, Iteration
from allhands.loop.left import by_break
from allhands.loop.lifecycle import TrainingStopped
from allhands.loop.loggers import loggers_of, prepare_logdir
from allhands.loop.loss_mean import LossMean
from allhands.loop.model_groups import OwnModels, named
from allhands.loop.own_steps import OwnSteps
from allhands.loop.passes import DataPasses
from allhands.loop.reporter import ForwardingReporter
from allhands.loop.reporter_choice import console, reporter_of
from allhands.loop.run_report import write_run_report
from allhands.loop.settings import Data, LoopSettings, absolute, resume_of
from allhands.loop.trackers import logger_list
from allhands.loop.workers import strategy_for
from allhands.strategies import Strategy
from allhands.world import current_world, finalize, init


class Loop(OwnSteps):
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
        precision: "fp32", "bf16", "bf16-true", "fp8" or "fp16"; see `SupervisedRunner.train`.
        clip_norm: bound of the global gradient norm of each optimizer.
        accumulate: micro-batches in one optimizer step.
        logdir: folder for checkpoints, ``metrics.csv`` and TensorBoard files.
        loggers: further ones, such as `allhands.WandbLogger`.
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
        loggers: Any = None,
        resume: str | Path | None = None,
        seed: int = 42,
        save_every: int | None = None,
        save_minutes: float | None = None,
        steps_per_epoch: int | None = None,
        step: str = "auto",
        activation_checkpointing: Any = False,
    ) -> None:
        own = OwnModels(
            named("model", model, models),
            named("optimizer", optimizer, optimizers),
            {"optimizer": scheduler, **(schedulers or {})} if scheduler is not None else schedulers,
            several=models is not None or optimizers is not None,
        )
        settings = LoopSettings(
            model=own.model,
            optimizer=next(iter(own.optimizers.values())),
            data=self.data_of(loaders, datasets),
            logdir=absolute(logdir),
            loggers=logger_list(loggers),
            resume=resume_of(resume),
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
        own.check(settings, world.world_size, "allhands.Loop(strategy={!r})")
        prepare_logdir(settings.logdir)
        # Where `allhands.spawn` has started it, the caller prints.
        kind = console if handback.arrived is None else ForwardingReporter
        super().__init__(settings, own, world, reporter_of(world, lambda: kind(False)))
        self._without_loader = self.measures[""] = LossMean(world, trains=True, counts=self.counts)

    def data_of(self, loaders: Any, datasets: Any) -> Data:
        """The data, as the user gave it."""
        return Data(loaders, datasets, optional=True)

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
                try:
                    yield epoch
                except GeneratorExit:
                    if self._left(sys._getframe(1)):
                        return
                    raise
                rates, seconds = self._end(epoch)
                self._report("epoch", self.epoch, number, epoch.values, rates, seconds)

    def steps(self, number: int) -> Iterator[Iteration]:
        """The iterations that are left of `number`, over as many passes over the data as it takes;
        without loaders, iterations of your own.

        Raises:
            SystemExit: a signal ended the training, after a checkpoint was saved.
        """
        check_whole("loop.steps(number)", number)
        self.num_epochs, self.settings.steps_per_epoch, self.num_steps = 1, number, number
        if self.passes is None:
            self.passes = DataPasses()
        if len(self.trained) > 1:
            raise UserError(
                f"loop.steps with the loaders {', '.join(feed.name for feed in self.trained)}; "
                "pass one whose name begins with 'train'"
            )
        for name, group in self.groups.items():
            group.schedule.count_steps(name)
        with self._running("step"):
            self._leave_out_steps(number)
            for position in super().epochs():
                measure = self._without_loader
                batches: Iterator[Any]
                if self.trained:
                    measure = self.measures[self.trained[0].name]
                    batches = (Batch(self, one) for one in self.train(self.trained[0], measure))
                else:
                    batches = self._own_iterations(position)
                for batch in batches:
                    self.batch = batch
                    step = Iteration(self, self.global_step + 1, batch)
                    try:
                        yield step
                    except GeneratorExit:
                        if self._left(sys._getframe(1)):
                            return
                        raise
                    self.end_iteration()
                    step.close()
                    if self.stop_reason is not None:
                        break
                self._end(Epoch(self, 1))

    def agree(self) -> None:
        try:
            super().agree()
        except TrainingStopped:
            # The user's code holds the generator, which may not be closed before the process ends.
            self.checkpoints.close()
            self.leave_for_signal()
            raise

    def _left(self, frame: FrameType | None) -> bool:
        """Whether the training ends here, because the user's code has left its ``for``; else an
        error ends it."""
        left = by_break(frame)
        if left:
            calls.note("the end of the training, by a break")
        return left

    def _leave_out_steps(self, number: int) -> None:
        """A training that had come to its end goes on where it is to have more steps now."""
        before = self.global_step - (self.position.steps if self.position is not None else 0)
        if before:
            self.num_epochs = self.epoch + (before < number)
            self.settings.steps_per_epoch = number - before

    def _own_iterations(self, position: Any) -> Iterator[None]:
        self.begin_steps(self._without_loader)
        assert self.settings.steps_per_epoch is not None
        for _ in self.due(iter(range(position.steps, self.settings.steps_per_epoch))):
            yield None
            self.global_step += 1
            position.steps += 1

    def _end(self, epoch: Epoch) -> tuple[list[float], float]:
        """The body of an epoch is through; the learning rates with which it began, and how long it
        took."""
        assert self.position is not None
        self.check_used()
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
    def _running(self, row: str = "epoch") -> Iterator[None]:
        if self._loggers is not None:
            raise UserError(
                "the loop's training has ended; call loop.epochs(…) or loop.steps(…) once, and "
                "make a new allhands.Loop for another training"
            )
        with calls.watch(self.world, worker.fail), self, self.misuse:
            self._row = row
            self.regrouped = self._open_loggers
            self._open_loggers()
            try:
                yield
            finally:
                assert self._loggers is not None
                self._loggers.close()
            if self.stop_reason is not None:
                self.reporter.line(f"stopped {self.where}: {self.stop_reason}")
            self.finish()
            write_run_report(self, self._loggers)
            self.give_back(keep=True)

    def _open_loggers(self) -> None:
        rows, step = len(self.history["epoch"]), self.global_step or None
        self._loggers = loggers_of(
            self.settings, self.world, self.reporter, self._loggers, rows, step, self._row
        )

    def stop(self, reason: str) -> None:  # type: ignore[override]
        """End the training after the current epoch, or iteration of `steps`; to be called on every
        rank. That epoch is evaluated, logged and saved; a ``break`` out of `epochs` or `steps`,
        on every rank, ends the training without that.

        Args:
            reason: is printed.
        """
        self.stop_reason = reason
