"""The arguments of Catalyst's `train`, as those of ours."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import allhands.runner
from allhands.catalyst.engines import apply_engine
from allhands.catalyst.folder_loggers import logger_callbacks
from allhands.catalyst.setting_callbacks import SchedulerCallback
from allhands.catalyst.translation import translate
from allhands.errors import UserError, did_you_mean

# Arguments of Catalyst's, and what they are here.
_RENAMED = {
    "valid_metric": "main_metric",
    "minimize_valid_metric": "minimize_metric",
    "initial_seed": "seed",
}
_WITHOUT_EFFECT = ("timeit", "hparams")
_INSTEAD = {
    "stage_kwargs": "the arguments of train() by their names",
    "state_kwargs": "the arguments of train() by their names",
    "checkpoint_data": "a Callback with state_dict() and load_state_dict(state)",
}


def train_arguments(
    runner: Any, callbacks: list[Any], given: Mapping[str, Any], by_batch: bool
) -> tuple[dict[str, Any], list[Any]]:
    """What to call `allhands.Runner.train` with, and the callbacks that are left.

    Args:
        runner: trains.
        callbacks: of the caller.
        given: the arguments of Catalyst's `train`.
        by_batch: callbacks compute with each batch.
    """
    given = dict(given)
    for name in [name for name in given if name in _WITHOUT_EFFECT]:
        del given[name]
    for name, here in _RENAMED.items():
        if name in given and given.setdefault(here, given[name]) != given.pop(name):
            raise UserError(f"{name} and {here} are one argument; leave out one of them")
    for name, instead in _INSTEAD.items():
        if given.pop(name, None):
            raise UserError(f"train({name}=…): write {instead}")
    fp16, ddp, cpu = (given.pop(name, None) for name in ("fp16", "ddp", "cpu"))
    flags = {"fp16": (fp16, "precision", "fp16"), "ddp": (ddp, "distributed", True)}
    for name, (flag, here, value) in flags.items():
        if flag and given.setdefault(here, value) != value:
            raise UserError(f"{name}=True and {here}={given[here]!r}; leave out one of them")
    if cpu:
        runner.device = "cpu"
    engine = given.pop("engine", None) or runner.given_engine
    if engine is not None:
        apply_engine(runner, engine, given)
    callbacks = [*callbacks, *logger_callbacks(given.pop("loggers", None) or {})]
    for callback in callbacks:
        if isinstance(callback, SchedulerCallback) and callback.period is not None:
            given["scheduler"] = _with_period(given.get("scheduler"), callback)
    settings, rest = translate(runner, callbacks, given, by_batch)
    known = inspect.signature(allhands.runner.SupervisedRunner.train).parameters
    for name in settings:
        if name not in known:
            raise UserError(f"train has no argument {name!r}{did_you_mean(name, known)}")
    return settings, rest


def _with_period(scheduler: Any, callback: SchedulerCallback) -> Any:
    """The scheduler, or schedulers by name, of which one has the callback's period."""
    key, period = callback.scheduler_key, callback.period
    if scheduler is None:
        raise UserError("SchedulerCallback(mode=…) needs train(scheduler=…)")
    if not isinstance(scheduler, Mapping):
        return scheduler, period
    if key not in scheduler:
        raise UserError(
            f"SchedulerCallback(scheduler_key={key!r}): the schedulers are {', '.join(scheduler)}"
        )
    return {**scheduler, key: (scheduler[key], period)}
