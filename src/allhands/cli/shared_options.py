"""Options that several subcommands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]",
        help="Changes to the run file, such as optimizer.lr=0.01.",
        show_default=False,
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
