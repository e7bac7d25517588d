"""Curves over the number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from allhands.report.figures import TEXT, plain

_COLORS = (
    *("#2e6f95", "#d1495b", "#3a7d44", "#8f5da2", "#e08e45", "#4d908e", "#7d7d7d", "#b5838d"),
    *("#577590", "#bc6c25"),
)
_MARKERS = "os^Dv<>PX*"
# Where values differ by less, a power of ten is not enough to read them by.
_FEW = 200


def draw_scaling(
    axes: Any,
    numbers: Mapping[str, Sequence[int]],
    values: Mapping[str, Sequence[float]],
    title: str,
    limit: float | None,
) -> None:
    """Draw a curve a strategy on two logarithmic axes.

    Args:
        axes: matplotlib's.
        numbers: of GPUs, by strategy.
        values: likewise.
        title: what the values are.
        limit: is drawn as a line; None draws none.
    """
    axes.set_xscale("log")
    axes.set_yscale("log")
    for place, (name, found) in enumerate(values.items()):
        axes.plot(
            numbers[name],
            found,
            color=_COLORS[place % len(_COLORS)],
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=5,
            linewidth=1.5,
            alpha=0.9,
            label=name,
        )
    if limit is not None:
        axes.axhline(limit, color=TEXT, linewidth=1, linestyle="--")
        axes.annotate(
            f"{limit:g} GB",
            (0.99, limit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=TEXT,
        )
    axes.set_title(title, loc="left", fontweight="bold", color=TEXT)
    axes.set_xlabel("GPUs")
    ticks = [1, 10, 100, 1000, 10000]
    most = max((one for found in numbers.values() for one in found), default=1)
    shown = [tick for tick in ticks if tick <= most]
    axes.set_xticks(shown, [f"{tick:,}" for tick in shown])
    axes.yaxis.set_major_formatter("{x:,.10g}")
    low, high = axes.get_ylim()
    if high < _FEW * low:
        from matplotlib.ticker import LogLocator

        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axes.yaxis.set_minor_formatter("{x:,.10g}")
    else:
        axes.yaxis.set_minor_formatter("")
    plain(axes)
    axes.tick_params(which="minor", length=0)
