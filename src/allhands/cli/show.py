"""`allhands show`: the history of a run in the terminal."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from allhands.cli.run_folder import PLACES, RunFolder, read_folder
from allhands.cli.shared_options import Json
from allhands.report.history_table import text_table
from allhands.report.terminal_curves import curve_lines

_ROWS = 20


def show(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)
    ],
    *,
    rows: Annotated[
        int, typer.Option("--rows", help="The most rows to print; 0 prints all.", min=0)
    ] = _ROWS,
    curves: Annotated[bool, typer.Option(help="Draw curves below the table.")] = True,
    as_json: Json = False,
) -> int:
    """Show what a run has measured: a table of its history, the best row, and curves."""
    folder = read_folder(run)
    best = folder.best()
    if as_json:
        history = {name: [_plain(v) for v in values] for name, values in folder.rows.items()}
        print(json.dumps({"run": str(folder.path), "history": history, "best": best}))
        return 0
    width = shutil.get_terminal_size((80, 24)).columns
    for line in table(folder, width, rows or None):
        print(line)
    if curves:
        braille = (sys.stdout.encoding or "ascii").lower().startswith("utf")
        for line in all_curves(folder, width, braille):
            print(line)
    return 0


def table(folder: RunFolder, width: int, most: int | None) -> list[str]:
    """The rows of the history, the last `most` of them and the best one."""
    columns, best = folder.rows, folder.best()
    count = len(next(iter(columns.values()), []))
    if not count:
        return [f"{folder.path}: no row yet"]
    shown = text_table(
        {
            _title(name): [None if math.isnan(value) else value for value in values]
            for name, values in columns.items()
        },
        width,
        most,
        best,
        "; --rows 0 prints all",
    )
    if shown.left_out:
        left_out = f"no room for {', '.join(shown.left_out)}: see {folder.path}/metrics.csv"
        return [*shown.lines, left_out]
    return shown.lines


def all_curves(folder: RunFolder, width: int, braille: bool) -> list[str]:
    found: dict[str, dict[str, list[float]]] = {}
    for name in folder.measured:
        loader, _, metric = name.partition("_")
        found.setdefault(metric or name, {})[loader] = folder.rows[name]
    lines: list[str] = []
    for metric, curves in found.items():
        if all(len(curve) > 1 for curve in curves.values()):
            lines += ["", *curve_lines(metric, curves, min(width, 100), braille=braille)]
    return lines


def _title(name: str) -> str:
    return name if name in PLACES else name.replace("_", " ", 1)


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
