"""`allhands run`: train what a run file describes.

A run file is read and checked before torch is imported, so that a mistake in it is told at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from allhands.cli.shared_options import Json, Overrides, RunFiles, read_checked
from allhands.environ import variables
from allhands.errors import UserError


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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    as_json: Json = False,
) -> int:
    """Train what a run file describes.

    The whole run file, with defaults and overrides, is stored as run.yml in its logdir. With
    --json, standard output has lines of JSON alone: {"line": …} and {"row": {"epoch": 1, …}}.
    """
    run_file = read_checked(config, [*(overrides or ()), *(["profile=20"] if profile else [])])
    if show:
        print(run_file.to_yaml(), end="")
        return 0
    if quiet and as_json:
        raise UserError("--quiet prints nothing, and --json prints JSON; leave one of them out")
    from allhands.cli.run_training import train

    with _output("quiet" if quiet else "json" if as_json else None):
        train(run_file)
    return 0


@contextmanager
def _output(kind: str | None) -> Iterator[None]:
    """Within, trainings print so; None: as the variable of the environment says."""
    # The variable's module would import torch.
    with variables({} if kind is None else {"ALLHANDS_OUTPUT": kind}):
        yield
