"""From a run file to the objects that it names, and to a training of them, or a comparison of it
with itself."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from allhands import models
from allhands.cli import own_data
from allhands.cli.meshes import strategy_of
from allhands.cli.named import choose, is_kind, located, make
from allhands.config import RunFile
from allhands.data import catalogue, derive_seed, seed_everything
from allhands.federated.sites.definition import Definition
from allhands.federated.strategy import Federated
from allhands.loop.schedule import length_of_training
from allhands.loop.workers import plan
from allhands.runner import Callback, EarlyStopping, SupervisedRunner
from allhands.step import MuonAdamW
from allhands.strategies import STRATEGIES, Strategy, strategy_named
from allhands.verify.compare import verify as compare
from allhands.verify.federated_rounds import RoundsReport, verify_rounds
from allhands.verify.report import Report

# Short names; beside them the classes of torch.nn whose name ends in Loss.
_CRITERIA = {
    "cross_entropy": nn.CrossEntropyLoss,
    "nll": nn.NLLLoss,
    "mse": nn.MSELoss,
    "l1": nn.L1Loss,
    "smooth_l1": nn.SmoothL1Loss,
    "huber": nn.HuberLoss,
    "bce": nn.BCELoss,
    "bce_with_logits": nn.BCEWithLogitsLoss,
    "next_token": models.NextToken,
}
# Scheduler arguments that are the length of the training, in the scheduler's own steps.
_LENGTHS = ("total_steps", "T_max")


def train(
    run_file: RunFile,
    across: Callable[[Federated], Federated] | None = None,
    runner: type[SupervisedRunner] = SupervisedRunner,
) -> dict[str, Any]:
    """Make the objects that a run file names and train; returns the history.

    Args:
        run_file: the run.
        across: makes of its federated training one whose clients are elsewhere.
        runner: the class that trains.

    Raises:
        UserError: a name or option that does not exist, or cannot be honoured here; says where it
            was written.
    """
    given = run_file.config
    main_metric, minimize = given.main_metric, given.minimize_metric
    if minimize is None:
        minimize = main_metric == "loss"
    strategy = _strategy(run_file)
    if across is not None:
        if not isinstance(strategy, Federated):
            raise run_file.error(
                ("strategy", "name"), "sites train together by strategy.name: federated"
            )
        federated = strategy
        strategy = located(run_file, ("strategy",), lambda: across(federated))
    objects = _objects(run_file, lambda: _shares(strategy, given.workers, given.device))
    # The stored run.yml has every default, and is read back.
    unset = (None, type(given).model_fields["num_epochs"].default)
    if isinstance(strategy, Federated) and given.num_epochs not in unset:
        raise run_file.error(
            ("num_epochs",),
            "federated training goes by rounds; remove it, and write strategy.rounds: …",
        )
    callbacks: list[Callback] = [StoreRunFile(run_file.to_yaml())]
    if given.early_stopping is not None:
        stopping = given.early_stopping
        metric = stopping.metric or main_metric
        callbacks.append(
            EarlyStopping(
                stopping.patience,
                metric,
                minimize=minimize if metric == main_metric else metric == "loss",
                min_delta=stopping.min_delta,
            )
        )
    history: dict[str, Any] = runner(device=given.device).train(
        **objects,
        metrics=given.metrics,
        callbacks=callbacks,
        logdir=given.logdir,
        num_epochs=None if isinstance(strategy, Federated) else given.num_epochs,
        max_steps=given.max_steps,
        steps_per_epoch=given.steps_per_epoch,
        evaluate_every=given.evaluate_every,
        valid_loader=given.valid_loader,
        main_metric=main_metric,
        minimize_metric=minimize,
        verbose=given.verbose,
        resume=given.resume,
        distributed=strategy,
        workers=given.workers,
        check=given.check,
        overfit=given.overfit,
        load_best_on_end=given.load_best_on_end,
        log_every=given.log_every,
        save_every=given.save_every,
        save_minutes=given.save_minutes,
        step=given.step,
        profile=given.profile,
        activation_checkpointing=given.activation_checkpointing,
    )
    if given.logdir is not None:
        print(f"written to {given.logdir}: metrics.csv, run.yml, checkpoints/, tensorboard/")
    return history


def definition(run_file: RunFile) -> Definition:
    """The training of a run file as a site knows it: the objects that it names, and data that are
    read when they are wanted.

    Raises:
        UserError: a name or option that does not exist, or cannot be honoured at a site; says where
            it was written.
    """
    given, strategy = run_file.config, _strategy(run_file)
    if not isinstance(strategy, Federated):
        raise run_file.error(
            ("strategy", "name"), "sites train together by strategy.name: federated"
        )
    entry = _entry(run_file)
    return Definition(
        **_objects(run_file, lambda: 1),
        strategy=strategy,
        runner=SupervisedRunner(device=given.device),
        device=given.device,
        labels=(entry.classes if entry is not None else ()) or None,
        check=given.check,
        overfit=given.overfit,
    )


def _shares(strategy: Strategy, workers: int | None, device: str | None) -> int:
    chosen = plan(strategy, workers, device)
    if chosen.rendezvous is not None:
        chosen.rendezvous.close()
    return chosen.strategy.shares(chosen.world_size)


def verify(
    run_file: RunFile, strategies: Sequence[str] | None, workers: Sequence[int] | None, steps: int
) -> Report | RoundsReport:
    """Compare the training that a run file describes, distributed, with itself alone; see
    `allhands.verify`.

    Federated training is compared by rounds, as many as `steps` says. Nothing is written. Schedules
    are as long as with the smallest of the numbers of workers, which has the most steps.

    Args:
        run_file: the run; its `workers` do not count.
        strategies: names; the run file's own has the settings that are written there. None takes
            the run file's, or ddp where that is one process.
        workers: numbers of workers; None takes as many as a mesh has, or 1 and 2.
        steps: optimizer steps; no more than the whole training has are compared.

    Raises:
        UserError: a name or option that does not exist, or cannot be honoured here.
    """
    given = run_file.config
    own = _strategy(run_file)
    size = own.size_wanted()
    workers = workers or ([1, 2] if size is None else [size])
    fewest = min(own.shares(count) for count in workers)
    if isinstance(own, Federated):
        if strategies is not None and [name.lower() for name in strategies] != [own.name]:
            raise run_file.error(
                ("strategy", "name"),
                "--strategies compares optimizer steps; leave it out, or run with strategy=ddp",
            )
        return verify_rounds(
            lambda: _objects(run_file, lambda: fewest), own, workers, steps, given.device
        )
    entry = _entry(run_file)
    names = (
        strategies
        if strategies is not None
        else [own.name if own.name not in ("single", "dp") else "ddp"]
    )
    found: Report = compare(
        runner=SupervisedRunner(device=given.device),
        strategies=[own if name == own.name else strategy_named(name) for name in names],
        workers=list(workers),
        steps=steps if entry is None else min(steps, _length(run_file, "step", entry, fewest)),
        steps_per_epoch=given.steps_per_epoch,
        evaluate_every=given.evaluate_every,
        **_objects(run_file, lambda: fewest),
    )
    return found


def _objects(run_file: RunFile, workers: Callable[[], int]) -> dict[str, Any]:
    """What `train` and `allhands.verify` both take. `workers` is asked only when a schedule needs
    the training's length."""
    given = run_file.config
    entry = _entry(run_file)
    model = _model(run_file, entry)
    optimizer = _optimizer(run_file, model)
    return {
        "model": model,
        "criterion": _criterion(run_file),
        "optimizer": optimizer,
        "scheduler": _scheduler(run_file, optimizer, entry, workers),
        "datasets": {
            "batch_size": given.data.batch_size,
            "num_workers": given.data.num_workers,
            "drop_last": given.data.drop_last,
            "get_datasets_fn": load_datasets,
            "name": given.data.name,
            "options": _data_options(run_file),
        },
        "seed": given.seed,
        "accumulate": given.accumulate,
        "clip_norm": given.clip_norm,
        "precision": given.precision,
    }


class StoreRunFile(Callback):
    """Writes the resolved run file into the logdir, once the files of an earlier run were moved
    aside."""

    def __init__(self, text: str) -> None:
        self.text = text

    def on_train_start(self, training: Any) -> None:
        folder = training.settings.logdir
        if folder is None or training.world.rank != 0:
            return
        aside = folder / f".run.{os.getpid()}.part"
        aside.write_text(self.text, encoding="utf-8")
        aside.replace(folder / "run.yml")


def load_datasets(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The loaders' data sets; called in every worker, so that the parent holds no data."""
    if own_data.is_function(name):
        return own_data.load(name, options)
    return {split: catalogue.load(name, split=split, **options) for split in ("train", "valid")}


# ---------------------------------------------------------------------- objects from names


def _entry(run_file: RunFile) -> catalogue.Entry | None:
    """What the catalogue knows of the data; None for those that a function makes."""
    path = ("data", "name")
    if own_data.is_function(run_file.config.data.name):
        return None
    entry = located(run_file, path, lambda: catalogue.info(run_file.config.data.name))
    if _is_text(entry):
        return _text(run_file, entry)
    return entry


def _is_text(entry: catalogue.Entry | None) -> bool:
    return entry is not None and len(entry.input_shape) == 1


def _text(run_file: RunFile, entry: catalogue.Entry) -> catalogue.Entry:
    """The entry for samples as long as the run file says; refuses what has no meaning for
    tokens."""
    given = run_file.config
    if _is_federated(run_file):
        raise run_file.error(
            ("data", "name"),
            "tokens have no label by which clients could get them; name a function of your own "
            "that makes its data sets, package.module:function or file.py:function",
        )
    if given.model.name in models.names() and given.model.name != "gpt":
        problem = (
            f"the data set '{entry.name}' is tokens, which {given.model.name} does not take; "
            "write model.name: gpt"
        )
        raise run_file.error(("model", "name"), problem)
    if given.criterion.name == "cross_entropy":
        problem = (
            "it compares one prediction a sample, and here each token has one; write "
            "criterion: next_token"
        )
        raise run_file.error(("criterion", "name"), problem)
    if "accuracy" in given.metrics:
        raise run_file.error(
            ("metrics",),
            "accuracy is of one prediction a sample, not of one a token; write metrics: []",
        )
    return catalogue.in_blocks(given.data.block) if given.data.block is not None else entry


def _data_options(run_file: RunFile) -> dict[str, Any]:
    data = run_file.config.data
    if own_data.is_function(data.name):
        for key in ("limit", "normalize", "labels", "block"):
            if getattr(data, key) is not None:
                raise run_file.error(
                    ("data", key),
                    f"the catalogue's sets have it; write data.options.{key} for a function",
                )
        root = None if data.root is None else str(Path(data.root).expanduser().absolute())
        return located(
            run_file, ("data",), lambda: own_data.options_of(data.name, root, data.options)
        )
    if data.options:
        raise run_file.error(
            ("data", "options"),
            f"they are for a function, and '{data.name}' is in the catalogue; remove them",
        )
    wanted = run_file.config.data.model_dump(
        include={"root", "limit", "normalize", "labels", "block"}
    )
    if wanted["root"] is not None:
        wanted["root"] = str(Path(wanted["root"]).expanduser().absolute())
    options = {key: value for key, value in wanted.items() if value is not None}
    takes = ("root", "limit", *catalogue.info(run_file.config.data.name).options)
    for key in options:
        if key not in takes:
            name = run_file.config.data.name
            raise run_file.error(
                ("data", key),
                f"the data set '{name}' has no such option; set it to null. It takes: "
                f"{', '.join(takes)}",
            )
    return options


def _model(run_file: RunFile, entry: catalogue.Entry | None) -> nn.Module:
    section = run_file.config.model
    sizes = {}
    if entry is not None and _is_text(entry):
        sizes = {"vocab_size": entry.num_classes, "block_size": entry.input_shape[0]}
    elif entry is not None:
        classes = 20 if run_file.config.data.labels == "coarse" else entry.num_classes
        channels, height, width = entry.input_shape
        sizes = {
            "in_channels": channels,
            "image_size": height,
            "num_classes": classes,
            "in_features": channels * height * width,
            "out_features": classes,
        }
    takes = (
        inspect.signature(getattr(models, section.name)).parameters
        if section.name in models.names()
        else {}
    )
    options = {key: value for key, value in sizes.items() if key in takes} | section.options
    # The initial weights are a function of the seed, whatever else has drawn random numbers in this
    # process.
    seed_everything(derive_seed(run_file.config.seed, "model"))
    model: nn.Module = located(run_file, ("model",), lambda: models.build(section.name, **options))
    return model


def _criterion(run_file: RunFile) -> nn.Module:
    known = _CRITERIA | {name: getattr(nn, name) for name in dir(nn) if name.endswith("Loss")}
    made: nn.Module = make(run_file, "criterion", known, ())
    return made


def _optimizer(run_file: RunFile, model: nn.Module) -> Optimizer:
    known = {name: kind for name, kind in vars(torch.optim).items() if is_kind(kind, Optimizer)} | {
        "MuonAdamW": MuonAdamW
    }
    # Which parameters are for which is seen in the modules.
    of_model = choose(run_file, "optimizer", known)[1] is MuonAdamW
    made: Optimizer = make(
        run_file, "optimizer", known, (model if of_model else model.parameters(),)
    )
    return made


def _scheduler(
    run_file: RunFile,
    optimizer: Optimizer,
    entry: catalogue.Entry | None,
    workers: Callable[[], int],
) -> Any:
    section = run_file.config.scheduler
    if section is None:
        return None
    bases = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)
    known = {name: kind for name, kind in vars(lr_scheduler).items() if is_kind(kind, bases)}
    kind = choose(run_file, "scheduler", known)[1]
    by_step = kind in (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR) and not _is_federated(
        run_file
    )
    period = section.period or ("step" if by_step else "epoch")
    filled = {}
    takes = inspect.signature(kind).parameters
    if "epochs" not in section.options:  # OneCycleLR's other way of saying how long the training is
        for key in _LENGTHS:
            if key in takes and key not in section.options:
                filled[key] = _length(run_file, period, entry, workers())
    made = make(run_file, "scheduler", known, (optimizer,), **filled)
    return made, period


def _length(run_file: RunFile, period: str, entry: catalogue.Entry | None, workers: int) -> int:
    """How often a scheduler of that period steps in the whole training with so many workers."""
    given = run_file.config
    if _is_federated(run_file):  # schedules step once a round
        rounds: int = given.strategy.options.get(
            "rounds", inspect.signature(Federated).parameters["rounds"].default
        )
        return rounds
    epochs = 3 if given.check else given.num_epochs
    limit = 1 if given.overfit else 3 if given.check else math.inf
    whole = given.steps_per_epoch
    if whole is None and entry is not None:
        samples = min(entry.sizes["train"], given.data.limit or entry.sizes["train"])
        batch = given.data.batch_size * workers * given.accumulate
        whole = max(1, samples // batch if given.data.drop_last else -(-samples // batch))
    whole = None if whole is None else int(min(whole, limit))
    length = length_of_training(whole, epochs, given.max_steps)[period == "epoch"]
    if length is None:
        instead = "epoch" if period == "step" and given.max_steps is None else "step"
        raise run_file.error(
            ("data", "name"),
            "how many samples a function makes is known when it is called, and the length of "
            f"the training too; write scheduler.total_steps (or T_max), or period: {instead}",
        )
    return length


def _is_federated(run_file: RunFile) -> bool:
    return run_file.config.strategy.name.lower() == Federated.name


def _strategy(run_file: RunFile) -> Strategy:
    return strategy_of(run_file, STRATEGIES | {Federated.name: Federated})
