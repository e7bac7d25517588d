"""`Runner`: objects and steps of one's own in, trained models out, on any number of workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allhands.errors import UserError
from allhands.launch import handback
from allhands.loop import workers
from allhands.loop.epoch import Batch
from allhands.loop.loggers import prepare_logdir
from allhands.loop.notebook_reporter import in_notebook
from allhands.loop.own_steps import OwnSteps
from allhands.loop.reporter import Reporter
from allhands.loop.settings import Data, absolute, resume_of
from allhands.loop.trackers import logger_list
from allhands.report.history import History
from allhands.runner import handed_back
from allhands.runner.callbacks import callback_list
from allhands.runner.hooks import check_own_runner
from allhands.runner.own_settings import OwnTrainSettings
from allhands.runner.own_training import OwnTraining
from allhands.runner.train_settings import TrainSettings
from allhands.runner.training import Training
from allhands.strategies import Strategy
from allhands.world import World, slurm


class TrainingInterrupted(KeyboardInterrupt):
    """The stop button of a notebook has ended a training, whose weights are those of its last step.
    The cells that wait do not run."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the place of a traceback."""
        return ["KeyboardInterrupt: the training was stopped; runner.last_history has its rows"]


class Runner:
    """Trains with steps of your own: epochs, callbacks, tables and checkpoints are the runner's.

    Override `train_step`, and `valid_step` where there are loaders that are not trained on::

        class GAN(allhands.Runner):
            def train_step(self, loop, batch):
                def d_loss(batch):
                    ...

                def g_loss(batch):
                    ...

                loop.step(d_loss, batch, optimizer="d")
                loop.step(g_loss, batch, optimizer="g")

        GAN(model={"g": g, "d": d}).train(optimizer={"g": …, "d": …}, loaders={"train": train})

    `SupervisedRunner` is the one whose step is ``criterion(model(input), target)``.

    Args:
        model: default for the methods' `model`; one, or a dict by name.
        device: ``"cpu"`` or ``"cuda"``; None takes a GPU where there is one.

    Attributes:
        model: what `train` was given; in steps, ``loop.models`` also has what a strategy has put in
            the place of a model (fsdp, tensor).
        criterion: what `train` was given, on the device of the training.
        last_history: of the last training, also of one that Ctrl-C or a notebook's stop button has
            ended.
    """

    criterion: Any = None
    last_history: History | None = None

    def __init__(
        self, model: nn.Module | Mapping[str, nn.Module] | None = None, device: str | None = None
    ) -> None:
        self.model: Any = model
        self.device = None if device is None else torch.device(device).type

    # ------------------------------------------------------------------ what a subclass may change

    def setup(self, loop: OwnSteps) -> None:
        """Prepare what the steps use, on every rank, before a checkpoint is loaded and before the
        first batch: ``loop.register("replay", self.replay)`` has it saved in checkpoints.

        Args:
            loop: see `train_step`; ``loop.device`` and ``loop.world`` are known.
        """

    def train_step(self, loop: OwnSteps, batch: Batch) -> None:
        """Take the steps of one batch, with `allhands.Loop.step`: ``loop.step(loss_of, batch)``, or
        ``loop.step(d_loss, batch, optimizer="d")`` where there are several optimizers.

        What the step functions return beside the loss is averaged over all samples and reported.

        Args:
            loop: has what `allhands.Loop` has for a step: ``model`` or ``models``, ``step``,
                ``accumulating``, ``backward``, ``gather``, ``mean``, ``randn``, ``rand``.
            batch: this rank's share of the global batch.
        """
        raise UserError(
            f"{type(self).__name__} has no step; write def train_step(self, loop, batch), which "
            "calls loop.step(loss_of, batch)"
        )

    def valid_step(self, loop: OwnSteps, batch: Any) -> Any:
        """What is measured of a batch of a loader that is not trained on, in evaluation mode and
        without gradients.

        Args:
            loop: see `train_step`.
            batch: a micro-batch of this rank, on its device.

        Returns:
            A dict of means over the samples of the batch, or of pairs ``(sum, count)``, by name;
            they are averaged exactly over all samples of all ranks. A number alone is the "loss".
        """
        raise UserError(
            f"{type(self).__name__} has no valid_step; write def valid_step(self, loop, batch), "
            "which returns {'loss': loss}"
        )

    @property
    def validates(self) -> bool:
        """Whether a subclass has a `valid_step`."""
        return type(self).valid_step is not Runner.valid_step

    def evaluate(self, **_: Any) -> Any:
        """Not for steps of one's own: `train` evaluates with `valid_step`."""
        raise UserError(
            f"{type(self).__name__}.evaluate: steps of your own are evaluated by train(), with "
            "loaders={'train': …, 'valid': …} and valid_step; or use "
            "SupervisedRunner(model=…).evaluate(criterion=…, loaders=…) for one model"
        )

    def predict(self, **_: Any) -> Any:
        """Not for steps of one's own, of which it is not known what the output is."""
        raise UserError(
            f"{type(self).__name__}.predict: which output is meant is not known; write "
            "SupervisedRunner(model=…).predict(loader=…) for one model"
        )

    # ------------------------------------------------------------------ train

    def train(
        self,
        *,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        criterion: Any = None,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        scheduler: Any = None,
        loaders: Any = None,
        datasets: Any = None,
        metrics: Any = None,
        callbacks: Any = None,
        logdir: str | Path | None = None,
        loggers: Any = None,
        num_epochs: int | None = None,
        max_steps: int | None = None,
        steps_per_epoch: int | None = None,
        evaluate_every: int | None = None,
        valid_loader: str | None = None,
        main_metric: str = "loss",
        minimize_metric: bool = True,
        verbose: bool = False,
        resume: str | Path | None = None,
        distributed: bool | str | Strategy = False,
        workers: int | None = None,
        seed: int = 42,
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: str = "fp32",
        check: bool = False,
        overfit: bool = False,
        load_best_on_end: bool = False,
        log_every: int = 50,
        save_every: int | None = None,
        save_minutes: float | None = None,
        step: str = "auto",
        profile: int | None = None,
        activation_checkpointing: bool | str | Sequence[str] = False,
    ) -> History:
        """Train a model, in place, and return the history.

        With steps of your own, `model`, `optimizer`, `scheduler` and `criterion` may be dicts by
        name. An optimizer trains the models whose parameters it holds; a scheduler has its
        optimizer's name.

        Args:
            model: the bare module; it holds the trained weights afterwards, on the device where it
                was.
            criterion: with steps of your own anything, None too; it is ``self.criterion`` in them,
                modules on the device. Else ``(output, target)`` to one number, a tensor of shape
                []: the mean over the samples, or what PyTorch's own losses are a mean over; their
                sum, with an attribute ``reduction = "sum"``, is not divided by anything. Or to
                ``(sum, count)``, what to divide by what. `PerTarget` says that a function is a mean
                over the targets, and `ModelLoss` that the model has computed its loss itself;
                `OverBatch` computes it of the whole global batch. What is none of these is refused
                at the first step where a batch is divided among workers or micro-batches.
            optimizer: over the model's parameters.
            scheduler: anything with ``step()``; see `Schedule` for its period, which is printed.
            loaders: DataLoaders by name. A name that begins with "train" is trained on; others are
                evaluated.
            datasets: instead of loaders: ``{"batch_size": 32, "num_workers": 1, "train": ds,
                "valid": ds}``, or ``{"batch_size": 32, "get_datasets_fn": fn, **kwargs_of_fn}``,
                which builds the data only in the workers. `batch_size` is per worker.
            metrics: torchmetrics metrics, functions ``(output, target)`` to the mean over the
                samples, or names of built-in ones ("accuracy"); a list or a dict by name, or a
                dict of these by loader. Exact over all samples of all workers. Of a metric that
                computes a dict, its numbers are told as ``name_key``. None with steps of your own,
                which return what is measured.
            callbacks: list of `Callback`.
            logdir: folder for checkpoints, ``metrics.csv`` and TensorBoard files; None writes
                nothing. With one, SIGTERM and SIGUSR1 save a checkpoint and end the process with
                code 128 plus the signal's number.
            loggers: what takes the numbers as well: `allhands.WandbLogger`,
                `allhands.MLflowLogger`, an `allhands.Logger` of your own, or a list of them.
            num_epochs: epochs in all, those of a resumed checkpoint included. None is 1, or with
                `max_steps` no bound.
            max_steps: optimizer steps in all, those of a resumed checkpoint included, over as many
                passes over the data as it takes. With `num_epochs` too, the training ends at
                whichever comes first. A later training that is resumed with more steps goes on in
                the data where this one stopped.
            steps_per_epoch: end an epoch after so many optimizer steps with each loader that is
                trained on. The next one goes on in the data where it stopped; where the data ends,
                a new pass begins. For streams without an end, and for epochs that are shorter or
                longer than the data. None: an epoch is one pass over the data.
            evaluate_every: evaluate after so many optimizer steps, counted over all epochs, and
                after the last step; no longer at the ends of epochs. Each evaluation gives a row
                (with the means of training since the last one), a checkpoint and perhaps a new
                best; `EarlyStopping` and ReduceLROnPlateau look at each. None: evaluate at the end
                of each epoch.
            valid_loader: whose `main_metric` decides what is best; None takes "valid", or the first
                that is not trained on, or the trained one.
            main_metric: "loss" or the name of a metric, or of what the steps return.
            minimize_metric: whether smaller is better.
            verbose: draw a progress bar, and in a notebook curves.
            resume: a checkpoint, or "auto" for the newest whole one in `logdir`; None starts anew,
                and moves an earlier run's files aside. In a Slurm job that was started again
                (requeued), None goes on with the newest one that this job has saved in `logdir`.
            distributed: True starts one worker a GPU (a core, without GPUs) and trains with "ddp";
                or the name of a strategy, or a `Strategy`. In a world that something else has
                started (torchrun, srun, mpirun, ``allhands launch``), the run joins it, also with
                False. Where srun started one task on each of several nodes, each starts one worker
                a GPU of its node (`workers` of them, where that is given), and all of them make one
                world.
            workers: how many to start; only with `distributed`.
            seed: decides sample order, dropout and loader processes.
            accumulate: micro-batches in one optimizer step.
            clip_norm: bound of the global gradient norm.
            precision: "fp32", "bf16" or "fp16" (autocast; fp16 with loss scaling), or "bf16-true":
                the model computes in bf16 throughout, with weights cast at each call; what the
                optimizer updates stays as it is. "fp8": as "bf16-true", and linear layers multiply
                in float8, which rounds much more; on GPUs of compute capability 8.9 or more, with
                ``allhands[fp8]``.
            check: only 3 epochs of 3 steps.
            overfit: only the first step of each loader, in every epoch.
            load_best_on_end: leave the best epoch's weights in the model.
            log_every: optimizer steps between two points in TensorBoard, and between two looks at
                the loss on a GPU.
            save_every: optimizer steps between two checkpoints within an epoch; None saves at the
                ends of epochs, or with `evaluate_every` at evaluations, only.
            save_minutes: minutes after which a checkpoint is due within an epoch; None never asks
                for one.
            step: how an optimizer step is taken on a GPU. "graph" captures it in a CUDA graph for
                each shape of a batch, after three steps, and replays it; "eager" asks for its
                operations anew each time; "auto" captures where that can be done, and says why
                where it cannot. "compile", on CPUs too, compiles the model with torch.compile, and
                then does as "auto" does.
            profile: record a timeline of so many optimizer steps, after the first five, into
                ``logdir/profile``, a file a rank in Chrome's trace format, and print where a step's
                time goes; None records none.
            activation_checkpointing: layers that keep their input alone until the backward pass,
                and are computed again there: True for the members of the model's outermost lists
                and sequences that have parts, the name of a class, or a list of names of classes or
                modules. It takes less memory and more time, and changes no number.

        Returns:
            A `History`: the dict ``{"epoch": […], "step": […], "lr": […], "seconds": […], "train":
            {"loss": […], …}, "valid": {…}}``, one entry an epoch, or with `evaluate_every` one an
            evaluation: its "lr" is the rate then, and its "epoch" the one that ran, counted from 1.

        Raises:
            UserError: an argument cannot be honoured; the message names it and what to write
                instead.
            WorkerError: a worker failed; the message holds its traceback.
            SystemExit: a signal ended the training, after a checkpoint was saved.
            KeyboardInterrupt: Ctrl-C, or the notebook's stop button. The model, the optimizer and
                the callbacks are as the last step has left them, also where workers had them.
        """
        settings = self._settings(
            model=model if model is not None else self.model,
            criterion=criterion,
            optimizer=optimizer,
            scheduler=scheduler,
            metrics=metrics,
            data=Data(loaders, datasets),
            callbacks=callback_list(callbacks),
            logdir=absolute(logdir),
            loggers=logger_list(loggers),
            num_epochs=1 if num_epochs is None and max_steps is None else num_epochs,
            max_steps=max_steps,
            steps_per_epoch=steps_per_epoch,
            evaluate_every=evaluate_every,
            valid_loader=valid_loader,
            main_metric=main_metric,
            minimize_metric=minimize_metric,
            verbose=verbose,
            resume=resume_of(resume),
            seed=seed,
            accumulate=accumulate,
            clip_norm=clip_norm,
            precision=precision,
            check=check,
            overfit=overfit,
            load_best_on_end=load_best_on_end,
            log_every=log_every,
            save_every=save_every,
            save_minutes=save_minutes,
            step=step,
            profile=profile,
            activation_checkpointing=activation_checkpointing,
        )
        settings.validate()
        prepare_logdir(settings.logdir)
        if slurm.wants_requeue(os.environ) and settings.logdir is None:
            print(
                f"note: {slurm.REQUEUE_VARIABLE}=1 has no effect on this training, which saves "
                "nothing; pass logdir=…",
                flush=True,
            )
        plan = self._plan(distributed, workers)
        settings.strategy = plan.strategy
        settings.check_trainable(plan.world_size)
        # It takes half a second to import, so once for all workers.
        if settings.logdir is not None or settings.resume is not None:
            preload = ["torch.distributed.checkpoint"]
        else:
            preload = []
        home = next(settings.model.parameters(), torch.empty(0)).device
        hands_back = settings.strategy.train_instead() is None
        self.last_history = None
        try:
            history: History = plan.run(
                _train, self, settings, verbose=verbose, preload=preload, hands_back=hands_back
            )
            self.last_history = history
        except KeyboardInterrupt:
            if self.last_history is not None and in_notebook():
                raise TrainingInterrupted from None
            raise
        finally:
            if plan.count and home.type != "cpu":  # what workers have made is on the CPU
                handed_back.place(settings, home)
            if model is not None and self.last_history is not None:
                self.model = model
        return history

    # ------------------------------------------------------------------ what a kind of runner says

    def _settings(self, **given: Any) -> TrainSettings:
        check_own_runner(self, Runner)
        return OwnTrainSettings.of(type(self).__name__, **given)

    def _training(self, settings: Any, world: World, reporter: Reporter) -> Training:
        return OwnTraining(self, settings, world, reporter)

    def _plan(self, distributed: bool | str | Strategy, count: int | None) -> workers.Plan:
        return workers.plan(distributed, count, self.device)


def _train(
    runner: Runner, settings: TrainSettings, world: World, reporter: Reporter, shipped: bool
) -> History:
    # Each node's task has sent its own data.
    settings.data.same_everywhere = shipped and world.local_world_size == world.world_size
    if shipped:
        handback.remember(settings.model)
    own_training = settings.strategy.train_instead()
    if own_training is not None:
        history: History = own_training(runner, settings, world, reporter, shipped)["history"]
    else:
        home = next(settings.model.parameters(), torch.empty(0)).device
        training = runner._training(settings, world, reporter)
        if not shipped and world.environment == "alone":
            training.loop.agreement.take_interrupts()
        history = training.run()
        training.loop.give_back(keep=not shipped or world.local_rank == 0)
        if not shipped and home != world.device:
            handed_back.place(settings, home)
        runner.last_history = history
        if not shipped and training.loop.signal == signal.SIGINT:
            raise KeyboardInterrupt
    if shipped:
        handed_back.send(runner, settings, world, reporter)
    return history
