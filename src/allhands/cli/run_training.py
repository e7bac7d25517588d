"""From a run file to a training of the objects that it names, or a comparison of it with itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allhands.atomic_write import atomic_write_text
from allhands.cli.named import Choice, located, raise_all
from allhands.cli.run_data import entry_of, length_of
from allhands.cli.run_objects import (
    callbacks_of,
    loggers_of,
    loop_choice,
    metrics_of,
    objects_of,
    problems,
    runner_of,
    strategy_from,
)
from allhands.config import RunFile
from allhands.errors import UserError
from allhands.federated.sites.definition import Definition
from allhands.federated.strategy import Federated
from allhands.loop.loop import Loop
from allhands.loop.reporter_choice import console
from allhands.loop.spawned import call
from allhands.loop.workers import plan
from allhands.runner import Callback, SupervisedRunner
from allhands.strategies import Strategy, strategy_named
from allhands.verify.compare import verify as compare
from allhands.verify.federated_rounds import RoundsReport, verify_rounds
from allhands.verify.report import Report

_NAME = "run.yml"
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


def train(
    run_file: RunFile,
    across: Callable[[Federated], Federated] | None = None,
    runner: type[SupervisedRunner] | None = None,
    datasets: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the objects that a run file names and train; returns the history.

    Args:
        run_file: the run.
        across: makes of its federated training one whose clients are elsewhere.
        runner: the class that trains, in place of the one that the run file names.
        datasets: as `SupervisedRunner.train` takes them, in place of the run file's.

    Raises:
        UserError: a name or option that does not exist, or cannot be honoured here; says where it
            was written.
    """
    given = run_file.config
    raise_all(problems(run_file, files=across is None))
    if given.loop is not None and across is None:
        return train_own_loop(run_file)
    if across is not None:
        _refuse_own_steps(run_file, "sites train by epochs of their own")
    who = runner_of(run_file) if runner is None else runner(device=given.device)
    main_metric, minimize = given.main_metric, given.minimize_metric
    if minimize is None:
        minimize = main_metric == "loss"
    strategy = strategy_from(run_file)
    if across is not None:
        if not isinstance(strategy, Federated):
            raise run_file.error(
                ("strategy", "name"), "sites train together by strategy.name: federated"
            )
        federated = strategy
        strategy = located(run_file, ("strategy",), lambda: across(federated))
    objects = objects_of(run_file, lambda: _shares(strategy, given.workers, given.device))
    # The stored run.yml has every default, and is read back.
    unset = (None, type(given).model_fields["num_epochs"].default)
    if isinstance(strategy, Federated) and given.num_epochs not in unset:
        raise run_file.error(
            ("num_epochs",),
            "federated training goes by rounds; remove it, and write strategy.rounds: …",
        )
    callbacks: list[Callback] = [
        StoreRunFile(run_file.to_yaml()),
        *callbacks_of(run_file, main_metric, minimize),
    ]
    history: dict[str, Any] = who.train(
        **objects | ({} if datasets is None else {"datasets": datasets}),
        metrics=metrics_of(run_file),
        callbacks=callbacks,
        logdir=given.logdir,
        loggers=loggers_of(run_file),
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
        names = "metrics.csv, report.html, run.yml, checkpoints/, tensorboard/"
        console(verbose=False).line(f"written to {given.logdir}: {names}")
    return history


def definition(run_file: RunFile) -> Definition:
    """The training of a run file as a site knows it: the objects that it names, and data that are
    read when they are wanted.

    Raises:
        UserError: a name or option that does not exist, or cannot be honoured at a site; says where
            it was written.
    """
    given, strategy = run_file.config, strategy_from(run_file)
    if not isinstance(strategy, Federated):
        raise run_file.error(
            ("strategy", "name"), "sites train together by strategy.name: federated"
        )
    entry = entry_of(run_file)
    _refuse_own_steps(run_file, "sites train by epochs of their own")
    return Definition(
        **objects_of(run_file, lambda: 1),
        strategy=strategy,
        runner=runner_of(run_file),
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
    _refuse_own_steps(run_file, "write a script, and allhands verify script.py")
    own = strategy_from(run_file)
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
            lambda: objects_of(run_file, lambda: fewest), own, workers, steps, given.device
        )
    entry = entry_of(run_file)
    if strategies is not None:
        names = strategies
    else:
        names = [own.name if own.name not in ("single", "dp") else "ddp"]
    found: Report = compare(
        runner=runner_of(run_file),
        strategies=[own if name == own.name else strategy_named(name) for name in names],
        workers=list(workers),
        steps=steps if entry is None else min(steps, length_of(run_file, "step", entry, fewest)),
        steps_per_epoch=given.steps_per_epoch,
        evaluate_every=given.evaluate_every,
        **objects_of(run_file, lambda: fewest),
    )
    return found


def _refuse_own_steps(run_file: RunFile, instead: str) -> None:
    """Raise `UserError` where the steps are not the supervised runner's."""
    if run_file.config.loop is not None:
        raise run_file.error(("loop",), f"a loop of your own cannot be had here: {instead}")
    if not isinstance(runner_of(run_file), SupervisedRunner):
        raise run_file.error(("runner", "name"), f"steps of your own cannot be had here: {instead}")


def store(folder: Path, text: str) -> None:
    """Write a run file into a logdir, whole or not at all."""
    atomic_write_text(folder / _NAME, text)


class StoreRunFile(Callback):
    """Writes the resolved run file into the logdir, once the files of an earlier run were moved
    aside."""

    def __init__(self, text: str) -> None:
        self.text = text

    def on_train_start(self, training: Any) -> None:
        folder = training.settings.logdir
        if folder is not None and training.world.rank == 0:
            store(folder, self.text)
