"""Curves in a terminal, of braille characters: two dots wide and four high each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from allhands.report.table_layout import value_text

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARKS = "*+ox"  # where braille cannot be written


def curve_lines(
    title: str,
    curves: Mapping[str, Sequence[float]],
    width: int,
    height: int = 8,
    braille: bool = True,
) -> list[str]:
    """Curves over their rows, one above another in one frame.

    Args:
        title: what is measured.
        curves: by name, one value a row; NaN where there is none.
        width, height: in characters; the height is that of the curves alone.
        braille: False writes ASCII.
    """
    values = [v for curve in curves.values() for v in curve if math.isfinite(v)]
    if not values:
        return []
    low, high = min(values), max(values)
    labels = [value_text(high), value_text(low)]
    margin = max(map(len, labels)) + 1
    across, down = (2, 4) if braille else (1, 1)
    columns = max(2, width - margin - 1)
    grid = [[0] * columns for _ in range(height)]
    marks = [[" "] * columns for _ in range(height)]
    rows = max(len(curve) for curve in curves.values())
    for number, curve in enumerate(curves.values()):
        for x, value in _points(curve, rows, columns * across):
            share = (high - value) / (high - low) if high > low else 0.5
            y = min(height * down - 1, int(share * (height * down - 1) + 0.5))
            if braille:
                grid[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
            else:
                marks[y][x] = _MARKS[number % len(_MARKS)]
    if braille:
        marks = [[chr(0x2800 + cell) if cell else " " for cell in line] for line in grid]
    lines = [f"{title}: {', '.join(_named(curves, braille))}"]
    for number, line in enumerate(marks):
        label = labels[0] if number == 0 else labels[1] if number == height - 1 else ""
        bar = "┤" if braille else "|"
        lines.append(f"{label.rjust(margin - 1)} {bar}{''.join(line).rstrip()}".rstrip())
    return lines


def _named(curves: Mapping[str, Sequence[float]], braille: bool) -> list[str]:
    names = []
    for number, (name, curve) in enumerate(curves.items()):
        known = [value for value in curve if math.isfinite(value)]
        mark = "" if braille else f"{_MARKS[number % len(_MARKS)]} "
        names.append(f"{mark}{name} {value_text(known[-1])}" if known else f"{mark}{name} -")
    return names


def _points(curve: Sequence[float], rows: int, dots: int) -> list[tuple[int, float]]:
    """A value for every dot that the curve crosses, straight between its measurements."""
    at = [
        (int(place * (dots - 1) / max(1, rows - 1)), value)
        for place, value in enumerate(curve)
        if math.isfinite(value)
    ]
    found = list(at[:1])
    for (x, value), (next_x, next_value) in pairwise(at):
        steps = max(1, next_x - x)
        found += [
            (x + step, value + (next_value - value) * step / steps) for step in range(1, steps + 1)
        ]
    return found
