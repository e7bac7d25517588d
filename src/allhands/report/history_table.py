"""The rows of a training as a table, of text or of HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allhands.report.page import grid
from allhands.report.table_layout import TableLayout, value_text

#: Numbers by the name of a column, one a row; None where there is none.
Columns = Mapping[str, Sequence[float | None]]

_WHOLE = ("epoch", "round", "step")


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Attributes:
        lines: of it; the last one says which rows are shown, where some are not.
        left_out: names of the columns that have no room.
    """

    lines: list[str]
    left_out: list[str]


def text_table(
    columns: Columns, width: int, most: int | None = None, best: int | None = None, hint: str = ""
) -> TextTable:
    """The last rows of a table.

    Args:
        columns: at least one row.
        width: in characters.
        most: rows that are shown; None shows all.
        best: the number of a row that is shown too, with a mark.
        hint: how to see all rows.
    """
    shown, more = _last(columns, most, best)
    header = [*columns, *(["best"] if best is not None else [])]
    cells = [
        [
            *(cell_text(name, values[n]) for name, values in columns.items()),
            *(["*" if n == best else ""] if best is not None else []),
        ]
        for n in shown
    ]
    layout = TableLayout(header, cells[-1], width)
    lines = [*layout.header(), *(layout.row(row) for row in cells)]
    return TextTable([*lines, *([more + hint] if more else [])], layout.left_out)


def html_table(columns: Columns, most: int | None = None, hint: str = "") -> str:
    """The last rows of a table as a part of a page; see `text_table`."""
    shown, more = _last(columns, most)
    cells = ([cell_text(name, values[n]) for name, values in columns.items()] for n in shown)
    return (f"<p>{more}{hint}</p>" if more else "") + grid(list(columns), cells, left=0)


def _last(columns: Columns, most: int | None, best: int | None = None) -> tuple[list[int], str]:
    """The numbers of the rows to show, and what is said about the others."""
    count = len(next(iter(columns.values())))
    first = 0 if most is None else max(0, count - most)
    more = f"the last {count - first} of {count} rows" if first else ""
    return [n for n in range(count) if n >= first or n == best], more


def cell_text(name: str, value: float | None) -> str:
    """A number of a column."""
    if value is None:
        return "-"
    if name in _WHOLE:
        return f"{value:.0f}"
    if math.isnan(value):
        return "nan"
    if name in ("seconds", "lr"):
        return f"{value:.2f}" if name == "seconds" else f"{value:.3g}"
    return value_text(value)
