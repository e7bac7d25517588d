"""`allhands verify`: whether distributing changes the training that a run file describes, or a
script with a loop of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.cli.launch import parse
from allhands.cli.shared_options import RunFiles, read_checked
from allhands.errors import UserError, WorkerError

if TYPE_CHECKING:
    from allhands.verify import Report
    from allhands.verify.federated_rounds import RoundsReport


def verify(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT | KEY=VALUE...] [-- ARGS]",
            help="A Python script that trains with allhands.Loop, its own arguments after --; or "
            "changes of the run file's options, such as optimizer.lr=0.1.",
            show_default=False,
        ),
    ] = None,
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
            help="Strategies, with commas between them. Default: the run file's, or the script's.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", help="Optimizer steps to compare; of each optimizer.")
    ] = 20,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="The PNG to draw. Default: verify.png in the run file's logdir.",
            show_default=False,
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--page",
            help="The HTML page to write. Default: report.html in the run file's logdir.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds that a step of a script may take.")
    ] = 300.0,
) -> int:
    """Train for some steps alone and distributed, and say whether it is the same training.

    Exit code 0: the same. 1: a real difference, named in the table. 2: something has to be changed
    before this can run.
    """
    given = words or []
    script = given[0] if given and "=" not in given[0] else None
    if script is not None and config:
        raise UserError(
            f"both the script {script!r} and a run file were given; give one of them, and the "
            "script's own arguments after --"
        )
    counts = None if workers is None else [_count(word) for word in _words(workers, "--workers")]
    names = None if strategies is None else _words(strategies, "--strategies")
    for option, file in (("--plot", plot), ("--page", page)):
        if file is not None and not file.absolute().parent.is_dir():
            raise UserError(f"{option} {file}: there is no folder {file.absolute().parent}")
    try:
        if script is not None:
            report = _verify_script(
                script, given[1:], names, counts or [1, 2], steps, timeout, plot
            )
            if page is not None:
                _write_page(report, page, Path(script).name)
            return 0 if report.ok else 1
        run_file = read_checked(config, given)
        from allhands.cli import run_training
        from allhands.report import require_matplotlib

        if plot is not None:
            require_matplotlib()
        found = run_training.verify(run_file, names, counts, steps)
    except WorkerError as error:
        # 1 says that the training differs.
        raise WorkerError(
            str(error), error.rank, error.exit_code if error.exit_code > 1 else 2
        ) from error
    drawn = _draw(found, plot, run_file.config.logdir)
    if page is not None:
        _write_page(found, page, page.stem)
    elif run_file.config.logdir is not None:
        from allhands.report.page import NAME

        folder = Path(run_file.config.logdir).expanduser()
        _write_page(found, folder / NAME, folder.name)
    print(drawn)
    return 0 if found.ok else 1


def _verify_script(
    script: str,
    args: list[str],
    strategies: list[str] | None,
    workers: list[int],
    steps: int,
    timeout: float,
    plot: Path | None,
) -> Report:
    if parse([script]).kind != "script":
        raise UserError(
            f"{script!r} is no Python script; write allhands verify script.py, or KEY=VALUE for "
            "an option of the run file"
        )
    from allhands.verify.script_runs import verify_script

    report = verify_script(
        script,
        args,
        strategies=strategies,
        workers=workers,
        steps=steps,
        timeout=timeout,
        plot=plot,
    )
    if plot is not None:
        print(f"plot: {plot}")
    return report


def _write_page(report: Report | RoundsReport, path: Path, name: str) -> None:
    """Put the outcome into a page, which is made where there is none."""
    from allhands.loop.loggers import wanted
    from allhands.report.environment import environment
    from allhands.report.page import pairs, put_section, section, write_page

    if not wanted():
        return
    part = section("Is distributing the same training?", report.section(), "verify")
    if not put_section(path, part, "verify"):
        path.parent.mkdir(parents=True, exist_ok=True)
        verdict = "the same" if report.ok else "DIFFERS"
        more = section("Environment", pairs(environment()))
        write_page(path, f"Verified: {name}", f"distributed, it is {verdict}", [part, more])
    print(f"page: {path}")


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
