"""`allhands sweep`: a run file with many values of some keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from allhands.cli.shared_options import Overrides, RunFiles, read_checked
from allhands.errors import UserError


def sweep(
    overrides: Overrides = None,
    *,
    config: RunFiles = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            help="A key and its values: optimizer.lr=1e-3,1e-2. Of several keys, every combination "
            "is tried.",
            show_default=False,
        ),
    ] = None,
    between: Annotated[
        list[str] | None,
        typer.Option(
            "--between",
            help="A key and a range, in which Optuna proposes values: optimizer.lr=1e-5..1e-1:log; "
            "needs --trials.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", help="How many to try with --between.", min=1)
    ] = None,
    workers_each: Annotated[
        int, typer.Option("--workers-each", help="Workers of each training.", min=1)
    ] = 1,
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel", help="Trainings at a time; 0: as many as GPUs or cores allow.", min=0
        ),
    ] = 0,
    logdir: Annotated[
        Path, typer.Option("--logdir", help="The folder of the sweep; each trial has one inside.")
    ] = Path("logs/sweep"),
) -> int:
    """Train a run file with many values of some keys, and say which is best.

    The folder holds trials.csv, sweep.png (parallel coordinates, where matplotlib is installed) and
    a run folder for each trial. The same call again goes on where this one was stopped, and repeats
    what failed.
    """
    from allhands.cli.named import raise_all
    from allhands.cli.run_objects import problems
    from allhands.cli.sweep_space import Study, space_of
    from allhands.cli.sweep_trials import SweepTrial, Trials

    space = space_of(over or (), between or ())
    if bool(space.between) != (trials is not None):
        raise UserError(
            "--trials says how many values Optuna proposes, and goes with --between"
            if trials is not None
            else "--between needs --trials: how many values Optuna proposes"
        )
    own = {"logdir": "--logdir", "workers": "--workers-each", "resume": "", "verbose": ""}
    for text in [*(overrides or ()), *(f"{key}=" for key in space.keys)]:
        if (key := text.partition("=")[0]) in own:
            instead = f"write {own[key]}" if own[key] else "leave it out"
            raise UserError(f"{key}: a sweep sets it for each of its trainings; {instead}")
    for values in space.trial_values():  # told before any is trained
        tried = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        raise_all(problems(read_checked(config, [*(overrides or ()), *tried])))
    base = read_checked(config, overrides)
    given = base.config
    smaller = given.minimize_metric
    smaller = given.main_metric == "loss" if smaller is None else smaller
    files = [word for path in config or () for word in ("-C", str(path))]
    runs = Trials(logdir, [*files, *(overrides or ())], workers_each, parallel, print)
    runs.open({"space": space.described(), "workers": workers_each, "run": base.to_yaml()})
    if space.between:
        assert trials is not None
        study, most = Study(space, given.seed + len(runs.found), smaller), trials
        for one in runs.found:
            if one.is_done:
                study.tell(one.number, one.values, one.value)

        def propose(number: int) -> dict[str, Any] | None:
            return study.ask(number) if number <= most else None

        def tell(trial: SweepTrial) -> None:
            study.tell(trial.number, trial.values, trial.value if trial.is_done else None)
    else:
        grid = list(space.grid())

        def propose(number: int) -> dict[str, Any] | None:
            return grid[number - 1] if number <= len(grid) else None

        def tell(trial: SweepTrial) -> None:
            """A grid is what it is."""

    runs.run(propose, tell)
    return _tell_all(runs.found, space.keys, logdir, smaller, given.main_metric)


def _tell_all(found: list[Any], keys: list[str], logdir: Path, smaller: bool, metric: str) -> int:
    """Print the table, best first, and draw the picture."""
    from allhands.report.figures import has_matplotlib
    from allhands.report.parallel_coordinates import draw_parallel
    from allhands.report.table_layout import aligned, value_text

    done = sorted(
        (one for one in found if one.is_done), key=lambda one: one.value if smaller else -one.value
    )
    failed = [one for one in found if not one.is_done]
    lines = [["trial", *keys, metric, "seconds"]]
    for one in [*done, *failed]:
        value = value_text(one.value) if one.is_done else one.state
        settings = [
            f"{one.values.get(key):.4g}"
            if isinstance(one.values.get(key), float)
            else str(one.values.get(key))
            for key in keys
        ]
        lines.append([one.name, *settings, value, f"{one.seconds:.1f}"])
    print()
    print("\n".join(aligned(lines)))
    if len(done) > 1 and has_matplotlib():
        rows = [[one.values.get(key) for key in keys] for one in done]
        draw_parallel(
            logdir / "sweep.png", keys, rows, metric, [one.value for one in done], smaller
        )
        print(f"plot: {logdir / 'sweep.png'}")
    if done:
        print(f"best: {logdir / done[0].name}")
    if failed:
        print(f"{len(failed)} failed: see output.txt in their folders; the same call tries again")
    return 1 if failed else 0
