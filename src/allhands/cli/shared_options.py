"""Options that several subcommands take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from allhands.config import RunFile, read_run
from allhands.config.schema import (
    Criterion,
    Data,
    Model,
    Named,
    Optimizer,
    RunConfig,
    Runner,
    Section,
    Strategy,
)


def _keys(incomplete: str) -> list[str]:
    """The keys of a run file that begin so, for a shell."""
    found: list[str] = []
    for name, field in RunConfig.model_fields.items():
        section = field.default
        inner = type(section).model_fields if isinstance(section, (Section, Named)) else ()
        found += [f"{name}=", *(f"{name}.{key}=" for key in inner)]
    return [key for key in dict.fromkeys(found) if key.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]",
        help="Changes to the run file, such as optimizer.lr=0.01.",
        show_default=False,
        autocompletion=_keys,
    ),
]
RunFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        "-C",
        help="A run file; several are merged, the later ones win. Default: the digits job.",
    ),
]

Of = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="The folder of a run, for its best checkpoint (else its newest); or a checkpoint, "
        "such as logs/run/last.",
        show_default=False,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]",
        help="Changes to the run file, such as data.root=/other.",
        show_default=False,
    ),
]
Loaders = Annotated[
    list[str] | None,
    typer.Option(
        "--loader", help="A loader; may be repeated. Default: those that are not trained on."
    ),
]
Workers = Annotated[int, typer.Option("--workers", help="Processes to start.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def root_override(folder: Path | None) -> list[str]:
    """The change of a run file by which its data are those in a folder; none for None."""
    if folder is None:
        return []
    return [f"data.root={json.dumps(str(folder.expanduser().absolute()))}"]


def read_checked(files: list[Path] | None, overrides: list[str] | None) -> RunFile:
    """The run of these files and overrides. Where keys are wrong, names and options are looked at
    too, so that all mistakes are told at once.

    Raises:
        UserError: something is wrong; names all of it.
    """
    return read_run(files or (), overrides or (), _problems)


def _problems(run_file: RunFile) -> list[str]:
    """What is wrong with names and options; it takes an import of torch, for runs that have any."""
    given = run_file.config
    named = [given.model, given.criterion, given.optimizer, given.strategy, given.runner]
    named += [*filter(None, [given.scheduler, given.loop]), *(given.metrics or ())]
    named += given.callbacks
    if given.data == Data() and named == [Model(), Criterion(), Optimizer(), Strategy(), Runner()]:
        return []
    from allhands.cli.run_objects import problems

    return problems(run_file)
