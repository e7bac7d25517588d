"""What a training has measured, as curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allhands.errors import UserError
from allhands.report.figures import (
    TEXT,
    fixed_axes,
    label_below,
    new_figure,
    plain,
    save_figure,
    writing,
)
from allhands.report.metric_plot import Label, Line, metric_plot, value_bounds
from allhands.report.page import pictures
from allhands.report.png_curves import metrics_image, save_png
from allhands.report.svg_curves import metric_svg

# Of a curve: the places in the table at which something was measured, and what.
Curve = tuple[list[int], list[float]]

_COLOURS = {"train": "#8a93a3", "valid": "#d1495b"}
_OTHERS = (
    *("#2e6f95", "#e0a458", "#4f9d69", "#7b5ea7", "#3b3f46"),
    *("#c2613f", "#5fb3b3", "#a3a847", "#c06c9a", "#8c6d4f"),
)
_COLUMNS = 3
_MOST = 9  # axes in one picture
_PICTURES = 12  # of a page
_PARTS = 300  # of a curve, each of which has two points at most
_DOTS = 60  # measurements of a curve that are marked each


def draw_curves(
    path: str | Path, at: Mapping[str, Sequence[float]], curves: Mapping[str, Mapping[str, Curve]]
) -> None:
    """Draw a table of measurements into a picture: one axis a metric, one curve a loader.

    Args:
        path: of the picture; its ending says the format. A ``.png`` file is drawn without
            matplotlib, whose fonts it takes.
        at: the one column that curves are drawn over, by its name: "epoch", "round" or "step".
        curves: by metric and loader.

    Raises:
        UserError: there are no curves, matplotlib is not installed, or the file cannot be written.
    """
    if not curves:
        raise UserError(f"{path} is not drawn: there is no curve; curves needs one metric or more")
    if Path(path).suffix.lower() != ".png":
        save_figure(curves_figure(at, curves), path)
        return
    (over,) = at.items()
    names = list(curves)[:_MOST]
    plots = [_plot(name, over, curves[name]) for name in names]
    image = metrics_image(plots, min(len(names), _COLUMNS))
    with writing(path) as file:
        save_png(image, file)


def curves_figure(
    at: Mapping[str, Sequence[float]], curves: Mapping[str, Mapping[str, Curve]]
) -> Any:
    """What `draw_curves` draws, as a ``matplotlib.figure.Figure``.

    Raises:
        UserError: matplotlib is not installed.
    """
    ((label, places),) = at.items()
    names = list(curves)[:_MOST]
    columns = min(len(names), _COLUMNS)
    rows = math.ceil(len(names) / columns)
    figure = new_figure(max(4.5 * columns, 5), 3.4 * rows + 0.2)
    all_axes = fixed_axes(figure, rows, columns)
    for name, axes in zip(names, all_axes, strict=False):
        draw_metric(axes, name, (label, places), curves[name])
    for axes in all_axes[len(names) :]:
        axes.set_axis_off()
    return figure


def curve_pictures(label: str, at: list[float], curves: Mapping[str, Mapping[str, Curve]]) -> str:
    """A picture for each metric, as a part of a page."""
    if not curves:
        return "<p>Nothing was measured.</p>"
    shown = list(curves.items())[:_PICTURES]
    drawn = [metric_picture(name, (label, at), of_loaders) for name, of_loaders in shown]
    left_out = list(curves)[_PICTURES:]
    more = f"<p>Not drawn: {', '.join(left_out)}; see metrics.csv.</p>" if left_out else ""
    return pictures(drawn) + more


def metric_picture(
    name: str, over: tuple[str, Sequence[float]], loaders: Mapping[str, Curve], whole: bool = True
) -> str:
    """What `draw_metric` draws, as a part of a page; takes no matplotlib."""
    return metric_svg(_plot(name, over, loaders, whole), f"{name} over {over[0]}")


def _plot(
    name: str, over: tuple[str, Sequence[float]], loaders: Mapping[str, Curve], whole: bool = True
) -> list[Line | Label]:
    label, places = over
    curves = {}
    for loader, curve in loaders.items():
        rows, values = thinned(*curve)
        points = [places[row] for row in rows], values
        curves[loader] = _colour(loader, list(loaders)), points
    return metric_plot(name, label, curves, _shown(places, whole), whole, _DOTS)


def over(unit: str, at: Sequence[float], steps: Sequence[float]) -> tuple[str, list[float]]:
    """What curves are drawn over, its name first: `at`, which counts units, or the steps where
    several rows are of one."""
    return ("step", list(steps)) if len(set(at)) < len(at) else (unit, list(at))


def draw_metric(
    axes: Any,
    name: str,
    over: tuple[str, Sequence[float]],
    loaders: Mapping[str, Curve],
    whole: bool = True,
) -> None:
    """Draw one metric, a curve a loader.

    Args:
        axes: of `fixed_axes`.
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
    # A place of its own, above what numbers of the axis have in common (1e-6): matplotlib finds one
    # by measuring every text.
    axes.set_title(name, loc="left", fontweight="bold", color=TEXT, y=1.0, pad=15)
    label_below(axes, label)
    plain(axes, whole)
    if whole and places:
        axes.set_xlim(*_shown(places, whole))
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


def _shown(places: Sequence[float], whole: bool) -> tuple[float, float]:
    """The ends of an axis: a curve of one point, too, lies among all whole numbers."""
    span = max(places) - min(places)
    room = max(0.5, 0.03 * span) if whole else 0.05 * span or 0.5
    return min(places) - room, max(places) + room


def _bounds(axes: Any, values: list[float]) -> None:
    """Begin at 0 where `value_bounds` does."""
    finite = [value for value in values if math.isfinite(value)]
    if finite and value_bounds(finite)[0] == 0:
        axes.set_ylim(bottom=0)
