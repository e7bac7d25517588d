"""The picture of a learning-rate finder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allhands.report.figures import TEXT, plain

_LOSS, _SUGGESTION = "#2e6f95", "#d1495b"


def draw_rates(
    axes: Any, rates: Sequence[float], losses: Sequence[float], suggestion: float
) -> None:
    """Draw losses over the rates that they are of, on a logarithmic axis.

    Args:
        axes: matplotlib's.
        rates: growing.
        losses: one a rate.
        suggestion: one of the rates; is marked.
    """
    axes.set_xscale("log")
    axes.plot(rates, losses, color=_LOSS, linewidth=2)
    axes.axvline(suggestion, color=_SUGGESTION, linewidth=1, linestyle="--")
    loss = losses[list(rates).index(suggestion)]
    label = f"suggestion {suggestion:.2g}"
    axes.plot([suggestion], [loss], color=_SUGGESTION, marker="o", linestyle="", label=label)
    axes.set_title("loss, smoothed", loc="left", fontweight="bold", color=TEXT)
    axes.set_xlabel("learning rate")
    plain(axes)
    axes.tick_params(which="minor", length=0)
    axes.legend(frameon=False, fontsize=9, labelcolor=TEXT)
