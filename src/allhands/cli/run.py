"""`allhands run`: train what a run file describes.

A run file is read and checked before torch is imported, so that a mistake in it is told at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from allhands.cli.shared_options import Overrides, RunFiles, read_checked


def run(
    overrides: Overrides = None,
    *,
    config: RunFiles = None,
    show: Annotated[
        bool,
        typer.Option(
            "--show", help="Print the whole run file, defaults included, and train nothing."
        ),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Record a timeline of 20 steps into logdir/profile: profile=20."
        ),
    ] = False,
) -> int:
    """Train what a run file describes.

    The whole run file, with defaults and overrides, is stored as run.yml in its logdir.
    """
    run_file = read_checked(config, [*(overrides or ()), *(["profile=20"] if profile else [])])
    if show:
        print(run_file.to_yaml(), end="")
        return 0
    from allhands.cli.run_training import train

    train(run_file)
    return 0
