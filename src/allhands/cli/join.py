"""`allhands join`: add workers on this machine to an elastic job that runs elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from allhands.cli.launch import default_workers
from allhands.cli.launch_options import Grace
from allhands.errors import UserError
from allhands.launch.join_client import join as join_job
from allhands.wire import TOKEN


def join(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="HOST:PORT, as the job's launcher has printed it at its start."
        ),
    ],
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            help="How many workers. Default: one for each GPU, or for each core without GPUs.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"The file with the job's token that its launcher has named. Default: {TOKEN}."
        ),
    ] = None,
    grace: Grace = 5.0,
) -> int:
    """Add workers on this machine to a job that `allhands launch --elastic --max-workers` runs.

    They run the job's command in the working folder, and take part between two steps. SIGTERM and
    Ctrl-C let them leave after their step; the others go on.
    """
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: it must be at least 1")
    return join_job(address, read_token(token_file), workers or default_workers(), grace)


def read_token(file: Path | None) -> str:
    """The job's token, from its file, or from the environment."""
    if file is None:
        token = os.environ.get(TOKEN, "")
        if not token:
            raise UserError(
                f"the job's token is missing; write --token-file FILE with the file that its "
                f"launcher has named, or set {TOKEN}"
            )
        return token
    try:
        with open(file.expanduser(), encoding="ascii") as opened:
            mode, token = os.fstat(opened.fileno()).st_mode, opened.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {file} cannot be read: {error}") from None
    if mode & 0o077:
        raise UserError(
            f"--token-file {file}: others than its owner may read it (mode {mode & 0o777:o}); "
            f"write chmod 600 {file}"
        )
    if not token:
        raise UserError(f"--token-file {file} is empty; copy the file that the launcher has named")
    return token
