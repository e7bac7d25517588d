"""The objects that a run file names: model, criterion, optimizer, scheduler, metrics, callbacks,
runner, strategy."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from allhands import models
from allhands import runner as runners
from allhands.cli.meshes import strategy_of
from allhands.cli.named import Choice, among, choice, is_kind, raise_all
from allhands.cli.own_objects import check_together, is_own
from allhands.cli.run_data import check_data, data_options, entry_of, is_text, load_datasets
from allhands.cli.run_schedulers import scheduler_choice, scheduler_of, schedulers
from allhands.config import RunFile
from allhands.data import catalogue, derive_seed, seed_everything
from allhands.errors import UserError, kind_of
from allhands.federated.strategy import Federated
from allhands.loop.trackers import Logger, MLflowLogger, WandbLogger
from allhands.runner import Callback, Runner, SupervisedRunner
from allhands.runner.metrics import BUILT_IN
from allhands.step import MuonAdamW
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
    "next_token": models.NextToken,
}
_OF_CLASSES = ("cross_entropy", "crossentropyloss", "nll", "nllloss")
_STRATEGIES: dict[str, Any] = STRATEGIES | {Federated.name: Federated}
_RUNNERS = {"supervised": SupervisedRunner}
_CALLBACKS = {
    name: getattr(runners, name)
    for name in ("AveragedWeights", "EarlyStopping", "Freeze", "KeepBest", "StopAfter")
}
_LOGGERS = {kind.__name__: kind for kind in (WandbLogger, MLflowLogger)}
# Lists of sections: their short names, and what each must give.
_LISTED: dict[str, tuple[dict[str, Any], type]] = {
    "callbacks": (_CALLBACKS, Callback),
    "loggers": (_LOGGERS, Logger),
}
_METRIC_PACKAGES = (
    "audio",
    "classification",
    "clustering",
    "detection",
    "image",
    "nominal",
    "regression",
    "retrieval",
    "segmentation",
    "shape",
    "text",
)
# What the function that `loop` names may ask for beside the loop.
_ASKED = ("num_epochs", "max_steps", "criterion", "metrics")
# What torchmetrics' **kwargs takes.
_OF_METRICS = ("compute_on_cpu", "compute_with_cache", "dist_sync_on_step", "sync_on_compute")


def objects_of(run_file: RunFile, workers: Callable[[], int]) -> dict[str, Any]:
    """What `train` and `allhands.verify` both take. `workers` is asked only when a schedule needs
    the training's length.

    Raises:
        UserError: something that the run file says cannot be honoured; all that can be seen before
            anything is made is told at once, what is wrong with the data first.
    """
    raise_all(problems(run_file))
    given = run_file.config
    entry = entry_of(run_file)
    model = model_of(run_file, entry)
    optimizer = optimizer_of(run_file, model)
    return {
        "model": model,
        "criterion": criterion_of(run_file),
        "optimizer": optimizer,
        "scheduler": scheduler_of(run_file, optimizer, entry, workers),
        "datasets": datasets_of(run_file),
        "seed": given.seed,
        "accumulate": given.accumulate,
        "clip_norm": given.clip_norm,
        "precision": given.precision,
    }


def problems(run_file: RunFile, files: bool = False) -> list[str]:
    """What is wrong with the names and options of a run, each with its place; of the data first.

    Args:
        run_file: whose keys are right by themselves.
        files: also look whether the data are there.
    """
    found: list[str] = []

    def look(task: Callable[[], Any]) -> Any:
        try:
            return task()
        except UserError as error:
            found.append(str(error))
            return None

    look(lambda: check_together(_own_names(run_file.config.model_dump())))
    if files:
        look(lambda: check_data(run_file))
    if not found:
        look(lambda: data_options(run_file))
    entry = None if found else look(lambda: entry_of(run_file))
    given = run_file.config
    chosen: list[Callable[[], Choice]] = [
        lambda: _model_choice(run_file, entry),
        lambda: _criterion_choice(run_file),
        lambda: _optimizer_choice(run_file),
        lambda: _runner_choice(run_file),
        *(partial(_metric_choice, run_file, n, entry) for n in range(len(given.metrics or ()))),
        *(
            partial(_listed_choice, run_file, key, n)
            for key in _LISTED
            for n in range(len(getattr(given, key)))
        ),
    ]
    if given.scheduler is not None:
        chosen.append(lambda: scheduler_choice(run_file))
    if given.loop is not None:
        chosen.append(lambda: loop_choice(run_file))
    for make in chosen:
        made = look(make)
        if made is not None:
            found += made.problems()
    look(lambda: strategy_from(run_file))
    return found


def _own_names(values: Any) -> Iterator[str]:
    """The names of classes and functions of the user's, of all sections."""
    if isinstance(values, Mapping):
        name = values.get("name")
        if isinstance(name, str) and is_own(name):
            yield name
    if isinstance(values, (Mapping, list)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _own_names(value)


def datasets_of(run_file: RunFile) -> dict[str, Any]:
    """The data, made in the workers."""
    data = run_file.config.data
    return {
        "batch_size": data.batch_size,
        "num_workers": data.num_workers,
        "drop_last": data.drop_last,
        "get_datasets_fn": load_datasets,
        "name": data.name,
        "options": data_options(run_file),
    }


# ---------------------------------------------------------------------- model and criterion


def _model_choice(run_file: RunFile, entry: catalogue.Entry | None) -> Choice:
    section = run_file.config.model
    name, kind = among(run_file, ("model", "name"), section.name, _models(), "model")
    fills = _sizes(run_file, entry)
    return Choice(run_file, ("model",), name, kind, section.options, fills=fills)


def _models() -> dict[str, Any]:
    return {name: getattr(models, name) for name in models.names()}


def _sizes(run_file: RunFile, entry: catalogue.Entry | None) -> dict[str, int]:
    """The arguments of models that the data decide."""
    if entry is None:
        return {}
    if is_text(entry):
        return {"vocab_size": entry.num_classes, "block_size": entry.input_shape[0]}
    channels, height, width = entry.input_shape
    return {
        "in_channels": channels,
        "image_size": height,
        "num_classes": _classes(run_file, entry),
        "in_features": channels * height * width,
        "out_features": _classes(run_file, entry),
    }


def _classes(run_file: RunFile, entry: catalogue.Entry) -> int:
    return 20 if run_file.config.data.labels == "coarse" else entry.num_classes


def model_of(run_file: RunFile, entry: catalogue.Entry | None) -> Any:
    """The model; a dict where a function of the user's gives one."""
    chosen = _model_choice(run_file, entry)
    takes = chosen.parameters
    filled = {key: value for key, value in _sizes(run_file, entry).items() if key in takes}
    # The initial weights are a function of the seed, whatever else has drawn random numbers in this
    # process.
    seed_everything(derive_seed(run_file.config.seed, "model"))
    return chosen.make(**filled)


def _criterion_choice(run_file: RunFile) -> Choice:
    known, name = _criteria(), run_file.config.criterion.name
    chosen = choice(run_file, "criterion", known)
    is_class = inspect.isclass(chosen.kind)
    leading = 0 if is_class or not is_own(name) else 2
    return choice(run_file, "criterion", known, leading)


def _criteria() -> dict[str, Any]:
    return _CRITERIA | {name: getattr(nn, name) for name in dir(nn) if name.endswith("Loss")}


def criterion_of(run_file: RunFile) -> Any:
    """The criterion; a function of the user's is one itself."""
    return _called_or_itself(_criterion_choice(run_file))


def is_of_classes(run_file: RunFile) -> bool:
    """Whether the criterion compares one prediction a sample with its class."""
    return run_file.config.criterion.name.lower() in _OF_CLASSES


def _called_or_itself(chosen: Choice) -> Any:
    if inspect.isclass(chosen.kind) or not chosen.leading:
        return chosen.make()
    raise_all(chosen.problems())
    return partial(chosen.kind, **chosen.options) if chosen.options else chosen.kind


# ---------------------------------------------------------------------- optimizer


def _optimizers() -> dict[str, Any]:
    known = {name: kind for name, kind in vars(torch.optim).items() if is_kind(kind, Optimizer)}
    return known | {"MuonAdamW": MuonAdamW}


def _optimizer_choice(run_file: RunFile) -> Choice:
    return choice(run_file, "optimizer", _optimizers(), leading=1)


def optimizer_of(run_file: RunFile, model: Any) -> Any:
    """The optimizer of a model's parameters; a dict where a function of the user's gives one."""
    chosen = _optimizer_choice(run_file)
    of_parameters = inspect.isclass(chosen.kind) and chosen.kind is not MuonAdamW
    if not of_parameters:  # which parameters are for which is seen in the modules
        return chosen.make(model)
    if isinstance(model, Mapping):
        raise run_file.error(
            ("optimizer", "name"),
            f"the model is a dict of {', '.join(model)}; name a function of yours that gets it and "
            "returns optimizers by name",
        )
    return chosen.make(model.parameters())


# ---------------------------------------------------------------------- metrics, callbacks, runner


def _torch_metrics() -> dict[str, Any]:
    """The classes of torchmetrics by name."""
    import torchmetrics

    packages = [torchmetrics]
    packages += [importlib.import_module(f"torchmetrics.{name}") for name in _METRIC_PACKAGES]
    return {
        name: kind
        for package in packages
        for name, kind in vars(package).items()
        if is_kind(kind, torchmetrics.Metric) and kind is not torchmetrics.Metric
    }


def _metric_choice(run_file: RunFile, number: int, entry: catalogue.Entry | None) -> Choice:
    assert run_file.config.metrics is not None
    section = run_file.config.metrics[number]
    path = ("metrics", str(number))
    built_in = is_own(section.name) or section.name.lower() in BUILT_IN
    known = BUILT_IN if built_in else _torch_metrics() | BUILT_IN
    name, kind = among(run_file, (*path, "name"), section.name, known, "metric")
    if not inspect.isclass(kind):
        return Choice(run_file, path, name, kind, section.options, leading=2)
    fills = _metric_sizes(run_file, entry)
    extra = () if is_own(section.name) else _OF_METRICS
    return Choice(run_file, path, name, kind, section.options, fills=fills, extra=extra)


def _metric_sizes(run_file: RunFile, entry: catalogue.Entry | None) -> dict[str, Any]:
    if entry is None or is_text(entry):
        return {}
    return {"task": "multiclass", "num_classes": _classes(run_file, entry)}


def metrics_of(run_file: RunFile) -> dict[str, Any] | None:
    """The metrics by the names under which they are reported; None with steps of the user's, which
    say themselves what is measured."""
    given = run_file.config
    own_steps = not issubclass(_runner_choice(run_file).kind, SupervisedRunner)
    if given.metrics is None:
        of_classes = is_of_classes(run_file) and not own_steps
        return {"accuracy": BUILT_IN["accuracy"]} if of_classes else None if own_steps else {}
    found: dict[str, Any] = {}
    entry = entry_of(run_file)
    for number, section in enumerate(given.metrics):
        chosen = _metric_choice(run_file, number, entry)
        filled = _metric_sizes(run_file, entry)
        if section.options.get("task", "multiclass") != "multiclass":
            filled = {}
        takes = chosen.parameters
        label = section.label or chosen.name
        if label in found:
            raise run_file.error(
                chosen.path, f"two metrics are named '{label}'; name them apart: label: …"
            )
        if chosen.leading:
            found[label] = _called_or_itself(chosen)
        else:
            found[label] = chosen.make(**{key: filled[key] for key in filled if key in takes})
    return found or (None if own_steps else {})


def _listed_choice(run_file: RunFile, key: str, number: int) -> Choice:
    section = getattr(run_file.config, key)[number]
    path = (key, str(number))
    known, base = _LISTED[key]
    name, kind = among(run_file, (*path, "name"), section.name, known, base.__name__.lower())
    return Choice(run_file, path, name, kind, section.options)


def _listed(run_file: RunFile, key: str) -> list[Any]:
    """The objects of a list of sections."""
    found, base = [], _LISTED[key][1]
    for number in range(len(getattr(run_file.config, key))):
        chosen = _listed_choice(run_file, key, number)
        made = chosen.make()
        if not isinstance(made, base):
            raise run_file.error(
                chosen.path, f"it gives {kind_of(made)}; it must be an allhands.{base.__name__}"
            )
        found.append(made)
    return found


def loggers_of(run_file: RunFile) -> list[Logger]:
    """What takes the numbers beside the logdir."""
    return _listed(run_file, "loggers")


def callbacks_of(run_file: RunFile, main_metric: str, minimize: bool) -> list[Callback]:
    given = run_file.config
    found: list[Callback] = _listed(run_file, "callbacks")
    if given.early_stopping is not None:
        stopping = given.early_stopping
        metric = stopping.metric or main_metric
        smaller = minimize if metric == main_metric else metric == "loss"
        found.append(
            runners.EarlyStopping(
                stopping.patience, metric, minimize=smaller, min_delta=stopping.min_delta
            )
        )
    return found


def _runner_choice(run_file: RunFile) -> Choice:
    chosen = choice(run_file, "runner", _RUNNERS, fills=("device",))
    if not (inspect.isclass(chosen.kind) and issubclass(chosen.kind, Runner)):
        raise run_file.error(
            ("runner", "name"),
            "it is no class below allhands.Runner; write class Own(allhands.Runner), or in a "
            "function with a loop of its own: loop: …",
        )
    return chosen


def runner_of(run_file: RunFile) -> Any:
    """The runner that takes the steps."""
    chosen = _runner_choice(run_file)
    filled = {"device": run_file.config.device} if "device" in chosen.parameters else {}
    return chosen.make(**filled)


def loop_choice(run_file: RunFile) -> Choice:
    """The function of the user's that takes the steps of an `allhands.Loop`."""
    return choice(run_file, "loop", {}, leading=1, fills=_ASKED)


def strategy_from(run_file: RunFile) -> Strategy:
    return strategy_of(run_file, _STRATEGIES)


def known_names() -> dict[str, dict[str, Any]]:
    """By the class of a section: what its names stand for."""
    return {
        "Model": _models(),
        "Criterion": _criteria(),
        "Optimizer": _optimizers(),
        "Scheduler": schedulers(),
        "Metric": _torch_metrics() | BUILT_IN,
        "Callback": _CALLBACKS,
        "Tracker": _LOGGERS,
        "Runner": _RUNNERS,
        "Strategy": _STRATEGIES,
    }
