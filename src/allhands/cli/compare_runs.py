"""`allhands compare`: two runs side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from allhands.cli.run_folder import RunFolder, read_folder
from allhands.cli.shared_options import Json
from allhands.report.table_layout import aligned, value_text

_Run = Annotated[
    Path, typer.Argument(help="The folder of a run.", show_default=False, metavar="RUN")
]


def compare(first: _Run, second: _Run, *, as_json: Json = False) -> int:
    """Compare two runs: the settings in which they differ, and what was measured at the end and at
    the best row."""
    folders = (read_folder(first), read_folder(second))
    settings, measured = differing_settings(*folders), measurements(*folders)
    if as_json:
        print(json.dumps({"settings": settings, "measured": measured}, default=str))
        return 0
    print(f"A  {folders[0].path}\nB  {folders[1].path}")
    print()
    without = [str(folder.path) for folder in folders if folder.run_file() is None]
    if without:
        print(f"settings are not known: no run.yml in {' and '.join(without)}")
    elif settings:
        rows = [[key, _text(a), _text(b)] for key, (a, b) in settings.items()]
        print("\n".join(aligned([["setting", "A", "B"], *rows], left=range(3))))
    else:
        print("no setting differs")
    print()
    rows = [
        [name, _number(name, a), _number(name, b), "" if math.isnan(a - b) else f"{b - a:+.3g}"]
        for name, (a, b) in measured.items()
    ]
    print("\n".join(aligned([["measured", "A", "B", "B - A"], *rows], left=(0,))))
    return 0


def differing_settings(a: RunFolder, b: RunFolder) -> dict[str, tuple[Any, Any]]:
    """The keys of the run files that differ, with both values; without ``logdir`` and ``resume``,
    which say where."""
    files = a.run_file(), b.run_file()
    if files[0] is None or files[1] is None:
        return {}
    one, other = (dict(_leaves(file.config.model_dump())) for file in files if file is not None)
    return {
        key: (one.get(key), other.get(key))
        for key in dict.fromkeys([*one, *other])
        if one.get(key) != other.get(key) and key not in ("logdir", "resume")
    }


def _leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(values, list) and values and isinstance(values[0], Mapping):
        for number, value in enumerate(values):
            yield from _leaves(value, (*path, str(number)))
    else:
        yield ".".join(path), values


def measurements(a: RunFolder, b: RunFolder) -> dict[str, tuple[float, float]]:
    """What was measured at the last row and at the best one, and how long they took."""
    found: dict[str, tuple[float, float]] = {}
    names = dict.fromkeys([*a.measured, *b.measured])
    for name in names:
        found[f"{name}, last"] = (_at(a, name, -1), _at(b, name, -1))
    for name in names:
        found[f"{name}, best row"] = (_at(a, name, a.best()), _at(b, name, b.best()))
    found["rows"] = (_count(a), _count(b))
    found["seconds"] = (_sum(a), _sum(b))
    return found


def _at(folder: RunFolder, name: str, row: int | None) -> float:
    values = folder.rows.get(name, [])
    return values[row] if values and row is not None else math.nan


def _count(folder: RunFolder) -> float:
    return float(len(next(iter(folder.rows.values()), [])))


def _sum(folder: RunFolder) -> float:
    return sum(folder.rows.get("seconds", [math.nan]))


def _number(name: str, value: float) -> str:
    if name == "rows":
        return f"{value:.0f}"
    return f"{value:.1f}" if name == "seconds" else value_text(value)


def _text(value: Any) -> str:
    return "null" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)
