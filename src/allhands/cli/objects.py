"""From a run file to the objects that it names, and to a training of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from allhands import models
from allhands.config import RunFile, nearest
from allhands.data import catalogue, derive_seed, seed_everything
from allhands.errors import UserError
from allhands.runner import Callback, EarlyStopping, SupervisedRunner
from allhands.runner.workers import plan, world_around
from allhands.strategies import STRATEGIES, Strategy

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
}
# Scheduler arguments that are the length of the training, in the scheduler's own steps.
_LENGTHS = ("total_steps", "T_max")


def train(run_file: RunFile) -> dict[str, Any]:
    """Make the objects that a run file names and train; returns the history.

    Raises:
        UserError: a name or option that does not exist, or cannot be honoured here; says where it was written.
    """
    given = run_file.config
    main_metric, minimize = given.main_metric, given.minimize_metric
    if minimize is None:
        minimize = main_metric == "loss"
    strategy = _strategy(run_file)
    entry = _entry(run_file)
    model = _model(run_file, entry)
    optimizer = _optimizer(run_file, model)
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
    history: dict[str, Any] = SupervisedRunner(device=given.device).train(
        model=model,
        criterion=_criterion(run_file),
        optimizer=optimizer,
        scheduler=_scheduler(run_file, optimizer, entry, strategy),
        datasets={
            "batch_size": given.data.batch_size,
            "num_workers": given.data.num_workers,
            "drop_last": given.data.drop_last,
            "get_datasets_fn": load_datasets,
            "name": given.data.name,
            "options": _data_options(run_file),
        },
        metrics=given.metrics,
        callbacks=callbacks,
        logdir=given.logdir,
        num_epochs=given.num_epochs,
        valid_loader=given.valid_loader,
        main_metric=main_metric,
        minimize_metric=minimize,
        verbose=given.verbose,
        resume=given.resume,
        distributed=strategy,
        workers=given.workers,
        seed=given.seed,
        accumulate=given.accumulate,
        clip_norm=given.clip_norm,
        precision=given.precision,
        check=given.check,
        overfit=given.overfit,
        load_best_on_end=given.load_best_on_end,
        log_every=given.log_every,
        save_every=given.save_every,
        save_minutes=given.save_minutes,
    )
    if given.logdir is not None:
        print(f"written to {given.logdir}: metrics.csv, run.yml, checkpoints/, tensorboard/")
    return history


class StoreRunFile(Callback):
    """Writes the resolved run file into the logdir, once the files of an earlier run were moved aside."""

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
    """The loaders' data sets from the catalogue; called in every worker, so that the parent holds no data."""
    return {split: catalogue.load(name, split=split, **options) for split in ("train", "valid")}


# ---------------------------------------------------------------------- objects from names


def _entry(run_file: RunFile) -> catalogue.Entry:
    path = ("data", "name")
    entry = _located(run_file, path, lambda: catalogue.info(run_file.config.data.name))
    if len(entry.input_shape) != 3:
        raise run_file.error(
            path, "a run file trains on images: digits, mnist, cifar10 or cifar100; for others use SupervisedRunner"
        )
    return entry


def _data_options(run_file: RunFile) -> dict[str, Any]:
    wanted = run_file.config.data.model_dump(include={"root", "limit", "normalize", "labels"})
    if wanted["root"] is not None:
        wanted["root"] = str(Path(wanted["root"]).expanduser().absolute())
    options = {key: value for key, value in wanted.items() if value is not None}
    takes = ("root", "limit", *catalogue.info(run_file.config.data.name).options)
    for key in options:
        if key not in takes:
            name = run_file.config.data.name
            raise run_file.error(
                ("data", key), f"the data set '{name}' has no such option; set it to null. It takes: {', '.join(takes)}"
            )
    return options


def _model(run_file: RunFile, entry: catalogue.Entry) -> nn.Module:
    section = run_file.config.model
    classes = 20 if run_file.config.data.labels == "coarse" else entry.num_classes
    channels, height, width = entry.input_shape
    sizes = {
        "in_channels": channels,
        "image_size": height,
        "num_classes": classes,
        "in_features": channels * height * width,
        "out_features": classes,
    }
    takes = inspect.signature(getattr(models, section.name)).parameters if section.name in models.names() else {}
    options = {key: value for key, value in sizes.items() if key in takes} | section.options
    # The initial weights are a function of the seed, whatever else has drawn random numbers in this process.
    seed_everything(derive_seed(run_file.config.seed, "model"))
    model: nn.Module = _located(run_file, ("model",), lambda: models.build(section.name, **options))
    return model


def _criterion(run_file: RunFile) -> nn.Module:
    known = _CRITERIA | {name: getattr(nn, name) for name in dir(nn) if name.endswith("Loss")}
    made: nn.Module = _make(run_file, "criterion", known, ())
    return made


def _optimizer(run_file: RunFile, model: nn.Module) -> Optimizer:
    known = {name: kind for name, kind in vars(torch.optim).items() if _is_kind(kind, Optimizer)}
    made: Optimizer = _make(run_file, "optimizer", known, (model.parameters(),))
    return made


def _scheduler(run_file: RunFile, optimizer: Optimizer, entry: catalogue.Entry, strategy: Strategy) -> Any:
    section = run_file.config.scheduler
    if section is None:
        return None
    bases = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)
    known = {name: kind for name, kind in vars(lr_scheduler).items() if _is_kind(kind, bases)}
    kind = _choose(run_file, "scheduler", known)[1]
    period = section.period or ("step" if kind in (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR) else "epoch")
    filled = {}
    takes = inspect.signature(kind).parameters
    if "epochs" not in section.options:  # OneCycleLR's other way of saying how long the training is
        for key in _LENGTHS:
            if key in takes and key not in section.options:
                filled[key] = _length(run_file, period, entry, strategy)
    made = _make(run_file, "scheduler", known, (optimizer,), **filled)
    return made, period


def _length(run_file: RunFile, period: str, entry: catalogue.Entry, strategy: Strategy) -> int:
    """How often a scheduler of that period steps in the whole training."""
    given = run_file.config
    epochs = 3 if given.check else given.num_epochs
    if period == "epoch":
        return epochs
    workers = plan(strategy, given.workers, given.device).count or world_around() or 1
    samples = entry.sizes["train"]
    samples = min(samples, given.data.limit or samples)
    batch = given.data.batch_size * workers * given.accumulate
    steps = max(1, samples // batch if given.data.drop_last else -(-samples // batch))
    limit = 1 if given.overfit else 3 if given.check else steps
    return epochs * min(steps, limit)


def _strategy(run_file: RunFile) -> Strategy:
    made: Strategy = _make(run_file, "strategy", dict(STRATEGIES), ())
    return made


def _make(run_file: RunFile, section: str, known: Mapping[str, Any], positional: tuple[Any, ...], **filled: Any) -> Any:
    """An object of the class that a section names, from the section's options, which are checked first."""
    name, kind = _choose(run_file, section, known)
    chosen = getattr(run_file.config, section)
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in chosen.options.items()}
    if getattr(chosen, "lr", None) is not None:
        options["lr"] = chosen.lr
    parameters = dict(list(inspect.signature(kind).parameters.items())[len(positional) :])
    for key, value in options.items():
        if key not in parameters:
            raise run_file.error((section, key), f"{name} has no such option; {nearest(key, parameters)}")
        problem = _mismatch(parameters[key].default, value)
        if problem:
            raise run_file.error((section, key), problem)
    options |= filled
    missing = [
        key for key, p in parameters.items() if p.default is p.empty and key not in options and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    if missing:
        raise run_file.error((section,), f"{name} needs {', '.join(missing)}; write {section}.{missing[0]}: …")
    return _located(run_file, (section,), lambda: kind(*positional, **options))


def _choose(run_file: RunFile, section: str, known: Mapping[str, Any]) -> tuple[str, Any]:
    """The class that a section names, in any spelling of capitals, and that class's own name."""
    wanted = getattr(run_file.config, section).name
    lowered = {name.lower(): name for name in known}
    if wanted.lower() not in lowered:
        raise run_file.error((section, "name"), f"there is no such {section}; {nearest(wanted, known)}")
    name = lowered[wanted.lower()]
    return name, known[name]


def _is_kind(value: Any, bases: Any) -> bool:
    """Whether it is a public class below `bases`."""
    if not (inspect.isclass(value) and issubclass(value, bases)) or value.__name__.startswith("_"):
        return False
    return value not in (Optimizer, lr_scheduler.LRScheduler, getattr(lr_scheduler, "LambdaLR", None))


def _mismatch(default: Any, value: Any) -> str | None:
    """What a value must be, when it is not of the type of the option's default; None when it fits or none can be told."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "it must be true or false"
    if isinstance(default, (int, float)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if number else f"it must be a number; the default is {default}"
    if isinstance(default, str):
        return None if isinstance(value, str) else f"it must be a text, such as '{default}'"
    if isinstance(default, tuple):
        fits = isinstance(value, tuple) and len(value) == len(default)
        return None if fits else f"it must be a list of {len(default)} values, such as {list(default)}"
    return None


def _located(run_file: RunFile, path: tuple[str, ...], make: Callable[[], Any]) -> Any:
    """Call `make`; what it complains about is told with the place in the run file."""
    try:
        return make()
    except (UserError, ValueError, TypeError) as error:
        raise run_file.error(path, str(error)) from None
