"""Many trainings in one picture: an axis for each setting, and a line for each training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allhands.report.figures import FAINT, TEXT, new_figure, save_figure


def draw_parallel(
    path: str | Path,
    keys: Sequence[str],
    rows: Sequence[Sequence[Any]],
    metric: str,
    values: Sequence[float],
    smaller: bool,
) -> None:
    """Draw parallel coordinates: settings from left to right, and what was measured at the right.

    Args:
        path: of the picture.
        keys: of the settings.
        rows: a training each, with a value a key.
        metric: what was measured.
        values: by training.
        smaller: whether smaller is better; the best are drawn dark and last.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(max(5, 2.2 * (len(keys) + 1)), 4)
    axes = figure.subplots()
    columns = [*([row[n] for row in rows] for n in range(len(keys))), list(values)]
    scales = [_scale(column) for column in columns]
    order = sorted(range(len(rows)), key=lambda n: values[n], reverse=smaller)
    colours = figure_colours(len(order))
    for place, number in enumerate(order):
        heights = [at(column[number]) for (at, _), column in zip(scales, columns, strict=True)]
        best = place == len(order) - 1
        axes.plot(
            range(len(heights)),
            heights,
            color=colours[place],
            linewidth=2.5 if best else 1.2,
            alpha=1 if best else 0.75,
            zorder=2 + place,
        )
    for x, (_, ticks) in enumerate(scales):
        axes.axvline(x, color=FAINT, linewidth=1, zorder=1)
        for height, text in ticks:
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
            axes.text(
                x,
                height,
                text,
                fontsize=8,
                color=TEXT,
                ha="center",
                va="center",
                zorder=999,
                bbox=box,
            )
    axes.set_xticks(range(len(columns)), [*keys, metric], color=TEXT)
    axes.set_yticks([])
    axes.set_ylim(-0.08, 1.08)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    save_figure(figure, path)


def figure_colours(count: int) -> list[str]:
    """From faint to dark, the last one in red."""
    shades = [0.82 - 0.5 * place / max(1, count - 1) for place in range(count)]
    return [*(f"{shade:.3f}" for shade in shades[:-1]), "#d1495b"]


def _scale(column: Sequence[Any]) -> tuple[Any, list[tuple[float, str]]]:
    """Where a value lies on its axis, from 0 to 1, and what is written beside it."""
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in column):
        names = list(dict.fromkeys(str(value) for value in column))
        heights = {name: n / max(1, len(names) - 1) for n, name in enumerate(names)}
        return (lambda value: heights[str(value)]), [(heights[name], name) for name in names]
    low, high = min(column), max(column)
    by_magnitude = low > 0 and high / low >= 50
    change = math.log if by_magnitude else float
    span = change(high) - change(low) or 1.0
    # One value lies in the middle.
    middle = 0.5 if high == low else 0.0

    def at(value: float) -> float:
        return (change(value) - change(low)) / span + middle

    seen = sorted(set(column))
    shown = seen if len(seen) <= 6 else [low, high]
    return at, [(at(value), f"{value:.3g}") for value in shown]
