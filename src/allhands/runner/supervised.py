"""`SupervisedRunner`: objects in, a trained model out, on any number of workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allhands.errors import UserError, kind_of
from allhands.launch import handback
from allhands.loop import workers
from allhands.loop.history import History
from allhands.loop.loggers import prepare_logdir
from allhands.loop.reporter import Reporter
from allhands.loop.settings import Data, check_model, check_values
from allhands.loop.trainable import check_trainable
from allhands.runner import handed_back, standalone
from allhands.runner.evaluation import check_over_batch
from allhands.runner.hooks import check_runner
from allhands.runner.keys import Keys, check_keys, inputs_of, missing_key, takes_by_name, target_in
from allhands.runner.metrics import named_metrics
from allhands.runner.running import in_training
from allhands.runner.train_settings import TrainSettings, callback_list
from allhands.runner.training import Training
from allhands.strategies import Strategy
from allhands.world import World, slurm


class SupervisedRunner:
    """Trains, evaluates and applies a model that maps an input to an output, given targets.

    A batch is ``(input, target)``, ``(input, …, target)`` whose leading members are all passed to
    the model, or a dict in which `input_key` and `target_key` name the two. Override `handle_batch`
    for anything else, and `target_of` where the batch is an object of a class of its own.

    Args:
        model: default for the methods' `model`.
        device: ``"cpu"`` or ``"cuda"``; None takes a GPU where there is one.
        input_key: the model's input in batches that are dicts. A list of keys gives the model
            several: by their names where its ``forward`` has arguments of all these names, else in
            their order. A dict names the model's argument for each key, ``{"user": "user_id",
            "item": "item_id"}``.
        target_key: the target in batches that are dicts. A list of keys gives a dict of targets by
            key; a dict one by its own names.

    Raises:
        UserError: a key is no string, list or dict of strings.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        device: str | None = None,
        input_key: Keys = "features",
        target_key: Keys = "targets",
    ) -> None:
        self.model = model
        self.device = None if device is None else torch.device(device).type
        self.input_key: Keys = check_keys("input_key", input_key)
        self.target_key: Keys = check_keys("target_key", target_key)
        self._by_name: dict[
            type, bool
        ] = {}  # whether models of a class are given several inputs by name

    # ------------------------------------------------------------------ what a subclass may change

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Call `model` on a batch, which is on the device already; returns ``(output, target)``."""
        if type(batch) in (tuple, list):
            if len(batch) == 2:
                return model(batch[0]), batch[1]
            if len(batch) == 1:
                return model(batch[0]), None
            return model(*batch[:-1]), batch[-1]
        if isinstance(batch, Mapping):
            args, kwargs = self._inputs(model, batch)
            return model(*args, **kwargs), target_in(batch, self.target_key)
        return model(batch), None

    def target_of(self, batch: Any) -> Any:
        """The target in a batch; asked before the forward pass by criteria that count their
        targets.

        Raises:
            UserError: a dict without `target_key`, or an object of which it is not known where its
                target is.
        """
        if isinstance(batch, Mapping):
            if error := missing_key("target_key", self.target_key, batch):
                raise error
            return target_in(batch, self.target_key)
        if isinstance(batch, (tuple, list)) and batch:
            return batch[-1]
        name = type(self).__name__
        raise UserError(
            f"the criterion counts its targets, and {name} does not know where they are in a batch "
            f"that is {kind_of(batch)}; add to {name}: def target_of(self, batch): return batch.y"
        )

    def _inputs(
        self, model: nn.Module, batch: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        keys, by_name = self.input_key, False
        if error := missing_key("input_key", keys, batch):
            raise error
        if isinstance(keys, list):
            kind = type(model)
            if kind not in self._by_name:
                self._by_name[kind] = takes_by_name(model, keys)
            by_name = self._by_name[kind]
        return inputs_of(batch, keys, by_name)

    def rows_of(self, batch: Any) -> int | None:
        """How many samples a batch holds that a collate function of yours has made; None: as many
        as it was given.

        The length of the target's first dimension, where it is a tensor with one, else of the first
        tensor in the batch. Override it for batches of another form; nobody asks for batches that
        PyTorch's own collate function has made.
        """
        if batch is None:
            return 0
        if isinstance(batch, Mapping):
            members, target = list(batch.values()), target_in(batch, self.target_key)
        elif isinstance(batch, (list, tuple)):
            members, target = list(batch), batch[-1] if batch else None
        else:
            members, target = [batch], None
        if not members:
            return 0
        tensors = [
            member
            for member in (target, *members)
            if isinstance(member, torch.Tensor) and member.dim()
        ]
        return len(tensors[0]) if tensors else None

    @property
    def plain_batches(self) -> bool:
        """Whether no subclass has changed what is done with a batch."""
        return type(self).handle_batch is SupervisedRunner.handle_batch

    @property
    def takes_last_as_target(self) -> bool:
        """Whether the last member of a batch is the target, as far as no subclass has changed
        it."""
        own = type(self)
        return self.plain_batches and own.target_of is SupervisedRunner.target_of

    # ------------------------------------------------------------------ train

    def train(
        self,
        *,
        model: nn.Module | None = None,
        criterion: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        loaders: Any = None,
        datasets: Any = None,
        metrics: Any = None,
        callbacks: Any = None,
        logdir: str | Path | None = None,
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

        Args:
            model: the bare module; it holds the trained weights afterwards, on the device where it
                was.
            criterion: ``(output, target)`` to one number, a tensor of shape []: the mean over the
                samples, or what PyTorch's own losses are a mean over; their sum, with an attribute
                ``reduction = "sum"``, is not divided by anything. Or to ``(sum, count)``, what to
                divide by what. `PerTarget` says that a function is a mean over the targets, and
                `ModelLoss` that the model has computed its loss itself; `OverBatch` computes it of
                the whole global batch. What is none of these is refused at the first step where a
                batch is divided among workers or micro-batches.
            optimizer: over the model's parameters.
            scheduler: anything with ``step()``; see `Schedule` for its period, which is printed.
            loaders: DataLoaders by name. A name that begins with "train" is trained on; others are
                evaluated.
            datasets: instead of loaders: ``{"batch_size": 32, "num_workers": 1, "train": ds,
                "valid": ds}``, or ``{"batch_size": 32, "get_datasets_fn": fn, **kwargs_of_fn}``,
                which builds the data only in the workers. `batch_size` is per worker.
            metrics: torchmetrics metrics, functions ``(output, target)`` to the mean over the
                samples, or names of built-in ones ("accuracy"); a list or a dict by name. Exact
                over all samples of all workers.
            callbacks: list of `Callback`.
            logdir: folder for checkpoints, ``metrics.csv`` and TensorBoard files; None writes
                nothing. With one, SIGTERM and SIGUSR1 save a checkpoint and end the process with
                code 128 plus the signal's number.
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
            main_metric: "loss" or the name of a metric.
            minimize_metric: whether smaller is better.
            verbose: draw a progress bar.
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
            precision: "fp32", "bf16" or "fp16" (autocast; fp16 with loss scaling).
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
            ``{"epoch": […], "step": […], "lr": […], "seconds": […], "train": {"loss": […], …},
            "valid": {…}}``, one entry an epoch, or with `evaluate_every` one an evaluation: its
            "lr" is the rate then, and its "epoch" the one that ran, counted from 1.

        Raises:
            UserError: an argument cannot be honoured; the message names it and what to write
                instead.
            WorkerError: a worker failed; the message holds its traceback.
            SystemExit: a signal ended the training, after a checkpoint was saved.
            KeyboardInterrupt: Ctrl-C, or the notebook's stop button. The model, the optimizer and
                the callbacks are as the last step has left them, also where workers had them.
        """
        settings = TrainSettings(
            model=self._model(model),
            criterion=criterion,
            optimizer=optimizer,  # type: ignore[arg-type]
            scheduler=scheduler,
            data=Data(loaders, datasets),
            metrics=named_metrics(metrics),
            callbacks=callback_list(callbacks),
            logdir=None if logdir is None else Path(logdir).expanduser().absolute(),
            num_epochs=1 if num_epochs is None and max_steps is None else num_epochs,
            max_steps=max_steps,
            steps_per_epoch=steps_per_epoch,
            evaluate_every=evaluate_every,
            valid_loader=valid_loader,
            main_metric=main_metric,
            minimize_metric=minimize_metric,
            verbose=verbose,
            resume=None
            if resume is None
            else resume
            if resume == "auto"
            else str(Path(resume).expanduser().absolute()),
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
        check_trainable(settings, plan.world_size)
        check_over_batch(criterion, settings.strategy, plan.world_size)
        # It takes half a second to import, so once for all workers.
        preload = (
            ["torch.distributed.checkpoint"]
            if settings.logdir is not None or settings.resume is not None
            else []
        )
        home = next(settings.model.parameters(), torch.empty(0)).device
        hands_back = settings.strategy.train_instead() is None
        try:
            history: History = plan.run(
                _train, self, settings, verbose=verbose, preload=preload, hands_back=hands_back
            )
        finally:
            if plan.count and home.type != "cpu":  # what workers have made is on the CPU
                handed_back.place(settings, home)
        self.model = settings.model
        return history

    # ------------------------------------------------------------------ evaluate, predict

    def evaluate(
        self,
        *,
        model: nn.Module | None = None,
        criterion: Any = None,
        loaders: Any = None,
        datasets: Any = None,
        metrics: Any = None,
        distributed: bool | str | Strategy = False,
        workers: int | None = None,
        precision: str = "fp32",
        seed: int = 42,
        verbose: bool = False,
    ) -> dict[str, dict[str, float]]:
        """The loss and the metrics of every loader, each sample counted exactly once: ``{"valid":
        {"loss": …, …}}``.

        Arguments are those of `train`; the model is left as it was. In a callback,
        ``training.model`` (or the model that was given to `train`) is measured as it lies on the
        ranks; call it on all of them.
        """
        chosen, _ = in_training(self._model(model))
        if not callable(criterion):
            raise UserError("evaluate needs a criterion, such as torch.nn.CrossEntropyLoss()")
        check_values(chosen, "evaluate")
        data, named = Data(loaders, datasets), named_metrics(metrics)
        data.check(seed)
        return self._plan(distributed, workers).run(
            standalone.evaluate,
            self,
            (chosen, criterion, data, named, precision, seed),
            verbose=verbose,
        )

    def predict(
        self,
        *,
        model: nn.Module | None = None,
        loader: Any = None,
        dataset: Any = None,
        batch_size: int | None = None,
        distributed: bool | str | Strategy = False,
        workers: int | None = None,
        precision: str = "fp32",
        seed: int = 42,
    ) -> Any:
        """The model's output for every sample, in the data set's order, at any number of workers.

        Args:
            model: the module to apply.
            loader: a DataLoader; its shuffling is left out, so that row i belongs to sample i. A
                custom sampler is kept, and row i then belongs to the i-th sample that it gives.
                There is a row for each that its collate_fn makes.
            dataset: instead of a loader, read `batch_size` samples at a time.
            batch_size: with `dataset`, samples per worker and batch; None is 32.
            distributed, workers, precision, seed: as for `train`.

        Returns:
            CPU tensors of shape ``[samples, …]``, in the structure (tuple, list, dict) of the
            model's output.

        Raises:
            UserError: a loader with drop_last=True, which would lose rows; an output whose first
                dimension is no batch.
        """
        chosen, _ = in_training(self._model(model))
        check_values(chosen, "predict")
        if (loader is None) == (dataset is None):
            raise UserError("predict needs either loader= or dataset=")
        if loader is not None and batch_size is not None:
            raise UserError(
                f"predict(batch_size={batch_size}) goes with dataset=; a loader has its own: leave "
                "batch_size out"
            )
        data = (
            Data({"predict": loader}, None)
            if loader is not None
            else Data(
                None, {"batch_size": 32 if batch_size is None else batch_size, "predict": dataset}
            )
        )
        (source,) = data.sources(seed).values()
        if source.drop_last:
            raise UserError(
                "predict gives one row a sample, and this loader has drop_last=True; make it with "
                "drop_last=False"
            )
        return self._plan(distributed, workers).run(
            standalone.predict, self, (chosen, data, precision, seed)
        )

    # ------------------------------------------------------------------ small things

    def _model(self, model: nn.Module | None) -> nn.Module:
        chosen = model if model is not None else self.model
        if chosen is None:
            raise UserError("no model: pass model=… here or to SupervisedRunner(model=…)")
        check_model(chosen)
        check_runner(self, SupervisedRunner)
        return chosen

    def _plan(self, distributed: bool | str | Strategy, count: int | None) -> workers.Plan:
        return workers.plan(distributed, count, self.device)


def _train(
    runner: SupervisedRunner,
    settings: TrainSettings,
    world: World,
    reporter: Reporter,
    shipped: bool,
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
        training = Training(runner, settings, world, reporter)
        history = training.run()
        training.loop.state.give_back(keep=not shipped or world.local_rank == 0)
        if not shipped and home != world.device:
            handed_back.place(settings, home)
    if shipped:
        handed_back.send(runner, settings, world, reporter)
    return history
