"""What a training has measured, as curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allhands.report.figures import TEXT, new_figure, plain, save_figure

# Of a curve: the places in the table at which something was measured, and what.
Curve = tuple[list[int], list[float]]

_COLOURS = {"train": "#8a93a3", "valid": "#d1495b"}
_OTHERS = ("#2e6f95", "#e0a458", "#4f9d69", "#7b5ea7", "#3b3f46")
_COLUMNS = 3
_MOST = 9  # axes in one picture
_PARTS = 300  # of a curve, each of which has two points at most
_DOTS = 60  # measurements of a curve that are marked each


def draw_curves(
    path: str | Path,
    at: Mapping[str, Sequence[float]],
    curves: Mapping[str, Mapping[str, Curve]],
) -> None:
    """Draw a table of measurements into a picture: one axis a metric, one curve a loader.

    Args:
        path: of the picture; its ending says the format.
        at: the one column that curves are drawn over, by its name: "epoch", "round" or "step".
        curves: by metric and loader.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    ((label, places),) = at.items()
    names = list(curves)[:_MOST]
    columns = min(len(names), _COLUMNS)
    rows = math.ceil(len(names) / columns)
    figure = new_figure(max(4.5 * columns, 5), 3.4 * rows + 0.2)
    all_axes = figure.subplots(rows, columns, squeeze=False).flat
    for name, axes in zip(names, all_axes, strict=False):
        draw_metric(axes, name, (label, places), curves[name])
    for axes in list(all_axes)[len(names) :]:
        axes.set_axis_off()
    save_figure(figure, path)


def draw_metric(
    axes: Any,
    name: str,
    over: tuple[str, Sequence[float]],
    loaders: Mapping[str, Curve],
    whole: bool = True,
) -> None:
    """Draw one metric, a curve a loader.

    Args:
        axes: matplotlib's.
        name: of the metric.
        over: the name and the column that curves are drawn over.
        loaders: the curves.
        whole: the column holds whole numbers.
    """
    label, places = over
    for loader, curve in loaders.items():
        rows_of, values = thinned(*curve)
        axes.plot(
            [places[row] for row in rows_of],
            values,
            color=_colour(loader, list(loaders)),
            linewidth=2,
            marker="o" if len(values) <= _DOTS else "",
            markersize=3,
            label=loader,
        )
    axes.set_title(name, loc="left", fontweight="bold", color=TEXT)
    axes.set_xlabel(label)
    plain(axes, whole)
    _bounds(axes, [value for _, values in loaders.values() for value in values])
    axes.legend(frameon=False, fontsize=9, labelcolor=TEXT)


def thinned(rows: list[int], values: list[float]) -> Curve:
    """A curve with no more points than can be told apart: of each part of it, the least and the
    greatest value, at their places."""
    if len(values) <= 2 * _PARTS:
        return rows, values
    kept = {0, len(values) - 1}
    for part in range(_PARTS):
        inside = range(part * len(values) // _PARTS, (part + 1) * len(values) // _PARTS)
        known = [n for n in inside if math.isfinite(values[n])] or list(inside)
        kept |= {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}
    order = sorted(kept)
    return [rows[n] for n in order], [values[n] for n in order]


def _colour(loader: str, loaders: list[str]) -> str:
    others = [name for name in loaders if name not in _COLOURS]
    return _COLOURS.get(loader) or _OTHERS[others.index(loader) % len(_OTHERS)]


def _bounds(axes: Any, values: list[float]) -> None:
    """Begin at 0 where nothing is below it and that hides no difference."""
    finite = [value for value in values if math.isfinite(value)]
    if finite and min(finite) >= 0 and max(finite) > 3 * min(finite):
        axes.set_ylim(bottom=0)
