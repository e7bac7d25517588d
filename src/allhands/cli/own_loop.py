"""A function of the user's that trains with an `allhands.Loop` made from a run file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands.cli.named import Choice
from allhands.cli.run_objects import (
    loggers_of,
    loop_choice,
    metrics_of,
    objects_of,
    strategy_from,
)
from allhands.cli.stored_run import store
from allhands.config import RunFile
from allhands.errors import UserError
from allhands.federated.strategy import Federated
from allhands.loop.loop import Loop
from allhands.loop.spawned import call
from allhands.loop.workers import plan

# What the loop's own function decides, and no key of a run file.
_NOT_FOR_LOOPS = (
    "callbacks",
    "runner",
    "evaluate_every",
    "valid_loader",
    "main_metric",
    "minimize_metric",
    "load_best_on_end",
    "early_stopping",
    "check",
    "overfit",
    "log_every",
    "profile",
)


def _checked(run_file: RunFile) -> Choice:
    """The function, and its options.

    Raises:
        UserError: there is none, or a key has no meaning for a loop of the user's own.
    """
    given = run_file.config
    for key in _NOT_FOR_LOOPS:
        if getattr(given, key) != type(given).model_fields[key].default:
            raise run_file.error(
                (key,), "the function that `loop` names does this itself; remove the key"
            )
    return loop_choice(run_file)


def train_own_loop(run_file: RunFile) -> dict[str, Any]:
    """Train with the function that `loop` names, on the workers of the run; returns the history."""
    given, chosen, strategy = run_file.config, _checked(run_file), strategy_from(run_file)
    if isinstance(strategy, Federated):
        raise run_file.error(("loop",), "federated training has its own rounds; remove the key")
    who = plan(strategy, given.workers, given.device)
    objects = objects_of(run_file, lambda: strategy.shares(who.world_size))
    criterion = objects.pop("criterion")
    several = isinstance(objects["model"], Mapping)
    if several:
        for one in ("model", "optimizer", "scheduler"):
            objects[f"{one}s"] = objects.pop(one)
    settings = {
        "strategy": strategy,
        "device": given.device,
        "logdir": given.logdir,
        "resume": given.resume,
        "save_every": given.save_every,
        "save_minutes": given.save_minutes,
        "loggers": loggers_of(run_file),
        "steps_per_epoch": given.steps_per_epoch,
        "step": given.step,
        "activation_checkpointing": given.activation_checkpointing,
    }
    takes = chosen.parameters
    asked = {
        "num_epochs": given.num_epochs,
        "max_steps": given.max_steps,
        "criterion": criterion,
        "metrics": metrics_of(run_file) if "metrics" in takes else None,
    }
    if given.metrics and "metrics" not in takes:
        raise run_file.error(
            ("metrics",), f"{chosen.name} takes no argument metrics; add it, or remove the key"
        )
    options = chosen.options_fitted() | {key: asked[key] for key in asked if key in takes}
    text = run_file.to_yaml()
    arguments = (chosen.kind, {**objects, **settings}, options, given.logdir, text)
    history: dict[str, Any] = who.run(
        call, None, (_train, arguments), preload=["rich.console"], hands_back=False
    )
    return history


def _train(
    function: Any, settings: dict[str, Any], options: dict[str, Any], logdir: str | None, text: str
) -> dict[str, Any]:
    loop = Loop(**settings)
    function(loop, **options)
    if not loop.global_step:
        raise UserError(
            f"{getattr(function, '__name__', function)} took no step; write in it: for epoch in "
            "loop.epochs(num_epochs): …"
        )
    if loop.main and logdir is not None:
        store(Path(logdir).expanduser(), text)
    return loop.history
