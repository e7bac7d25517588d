"""Rows of numbers in the width of a terminal: aligned at the right, and what does not fit left
out."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

_VALUE, _SHORT, _LONGEST = 8, 4, 10
_GAP = 2


class TableLayout:
    """Where the columns of a table lie, as its header and its first row say.

    A header of several words ("train loss") takes two lines where one does not fit; names that are
    long are cut; then columns are left out, the least needed first.

    Args:
        header: names of the columns.
        cells: the first row.
        width: columns of the terminal.

    Attributes:
        left_out: the names of the columns that do not fit.
    """

    def __init__(self, header: Sequence[str], cells: Sequence[str], width: int) -> None:
        self.left_out: list[str] = []
        self._kept = list(range(len(header)))
        self._names = [[name] for name in header]
        self._cells = list(cells)
        if self._size() > width:
            self._names = [list(_two_lines(name)) for name in header]
        if self._size() > width:
            self._names = [[_cut(word) for word in words] for words in self._names]
        for number in _least_needed(header):
            if self._size() <= width:
                break
            self._kept.remove(number)
        self.left_out = [name for n, name in enumerate(header) if n not in self._kept]

    def header(self) -> list[str]:
        """The lines above the rows."""
        names = [self._names[number] for number in self._kept]
        lines = max(map(len, names))
        padded = [[""] * (lines - len(words)) + words for words in names]
        return [self._line([words[line] for words in padded]) for line in range(lines)]

    def row(self, cells: Sequence[str]) -> str:
        return self._line([cells[number] for number in self._kept])

    def _line(self, cells: Sequence[str]) -> str:
        widths = [self._width(number) for number in self._kept]
        parts = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return (" " * _GAP).join(parts).rstrip()

    def _width(self, number: int) -> int:
        cell, words = self._cells[number], self._names[number]
        name = max(map(len, words))
        if "/" in cell:  # 1/100, and later 100/100
            return max(name, 2 * len(cell.rpartition("/")[2]) + 1)
        least = _SHORT if words[-1] == "best" else _VALUE
        return max(name, len(cell), least)

    def _size(self) -> int:
        return sum(self._width(number) + _GAP for number in self._kept) - _GAP


def _two_lines(name: str) -> tuple[str, ...]:
    first, _, rest = name.partition(" ")
    return (first, rest) if rest else (name,)


def _cut(word: str) -> str:
    return word if len(word) <= _LONGEST else word[: _LONGEST - 1] + "…"


def _least_needed(header: Sequence[str]) -> list[int]:
    """The columns in the order in which they are left out; the first is never."""
    numbers = range(1, len(header))
    of_training = [n for n in numbers if header[n].startswith("train") and "loss" not in header[n]]
    rest = [n for n in reversed(numbers) if " " in header[n] and n not in of_training]
    named = [
        n for name in ("lr", "samples/s", "left", "step") for n in numbers if header[n] == name
    ]
    late = [n for name in ("seconds", "best") for n in numbers if header[n] == name]
    first = [*named, *of_training]
    others = [n for n in rest if n not in first]
    left = [n for n in numbers if n not in {*first, *others, *late}]
    return [*first, *others[:-1], *late, *left, *others[-1:]]


def aligned(lines: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Lines of cells in columns, which are aligned at the right, or those in `left` at the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def value_text(value: float) -> str:
    """A measurement in at most nine characters."""
    if math.isnan(value):
        return "nan"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.2e}"
