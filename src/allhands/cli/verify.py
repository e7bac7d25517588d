"""`allhands verify`: whether distributing changes the training that a run file describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.cli.shared_options import Overrides, RunFiles
from allhands.config import read_run
from allhands.errors import UserError, WorkerError

if TYPE_CHECKING:
    from allhands.verify import Report
    from allhands.verify.federated_rounds import RoundsReport


def verify(
    overrides: Overrides = None,
    *,
    config: RunFiles = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            help="Numbers of workers, with commas between them. Default: those of the mesh, or "
            "1,2.",
            show_default=False,
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            help="Strategies, with commas between them. Default: the run file's.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps to compare.")] = 20,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="The PNG to draw. Default: verify.png in the run file's logdir.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Train for some steps alone and distributed, and say whether it is the same training.

    Exit code 0: the same. 1: a real difference, named in the table. 2: something has to be changed
    before this can run.
    """
    run_file = read_run(config or (), overrides or ())
    counts = None if workers is None else [_count(word) for word in _words(workers, "--workers")]
    names = None if strategies is None else _words(strategies, "--strategies")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UserError(f"--plot {plot}: there is no folder {plot.absolute().parent}")
    from allhands.cli import run_objects
    from allhands.verify.report import require_matplotlib

    if plot is not None:
        require_matplotlib()
    try:
        report = run_objects.verify(run_file, names, counts, steps)
    except WorkerError as error:
        # 1 says that the training differs.
        raise WorkerError(
            str(error), error.rank, error.exit_code if error.exit_code > 1 else 2
        ) from error
    print(_draw(report, plot, run_file.config.logdir))
    return 0 if report.ok else 1


def _words(text: str, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UserError(
            f"{option} {text!r} names nothing; write {option} "
            + ("1,2" if option == "--workers" else "ddp")
        )
    return words


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise UserError(
            f"--workers {word!r} is no number of workers; write whole numbers of at least 1, such "
            "as --workers 1,2"
        )
    return int(word)


def _draw(report: Report | RoundsReport, plot: Path | None, logdir: str | None) -> str:
    """Draw the plot; where it is, or why there is none. Only one that was asked for must be."""
    if plot is not None:
        report.save_plot(plot)
        return f"plot: {plot}"
    if logdir is None:
        return "no plot: the run file has no logdir; --plot FILE draws one"
    path = Path(logdir).expanduser() / "verify.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        report.save_plot(path)
    except (UserError, OSError) as error:
        return f"no plot: {error}"
    return f"plot: {path}"
