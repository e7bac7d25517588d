"""`allhands run`: train what a run file describes.

A run file is read and checked before torch is imported, so that a mistake in it is told at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allhands.config import read_run


def run(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]", help="Changes to the run file, such as optimizer.lr=0.01.", show_default=False),
    ] = None,
    *,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", "-C", help="A run file; several are merged, the later ones win. Default: the digits job."),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the whole run file, defaults included, and train nothing.")] = False,
) -> int:
    """Train what a run file describes.

    The whole run file, with defaults and overrides, is stored as run.yml in its logdir.
    """
    run_file = read_run(config or (), overrides or ())
    if show:
        print(run_file.to_yaml(), end="")
        return 0
    from allhands.cli.objects import train

    train(run_file)
    return 0
