"""How many workers took part in a training, over its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from allhands.report.figures import TEXT, new_figure, plain, save_figure

_LINE, _LOST, _JOINED = "#2e6f95", "#d1495b", "#4f9d69"
# Seconds of each unit of time, and from how many seconds on it is used.
_UNITS = {"hours": (3600, 3 * 3600), "minutes": (60, 180), "seconds": (1, 0)}


@dataclass(frozen=True)
class Change:
    """A change of members, or the beginning of a training.

    Attributes:
        at: when, in seconds since the epoch.
        workers: how many take part from then on.
        joined: how many of them are new.
        begins: a training begins, or goes on from a checkpoint.
    """

    at: float
    workers: int
    joined: int = 0
    begins: bool = False


def draw_membership(path: str | Path, changes: Sequence[Change], until: float) -> None:
    """Draw the number of workers over time, and mark who was lost and who has joined.

    Args:
        path: of the picture; its ending says the format.
        changes: the oldest first; the first is a beginning.
        until: when the training ended, in seconds since the epoch.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(8, 3.2)
    draw_members(figure, changes, until)
    save_figure(figure, path)


def draw_members(figure: Any, changes: Sequence[Change], until: float) -> None:
    """Draw what `draw_membership` writes into a figure of matplotlib's."""
    start, span = changes[0].at, until - changes[0].at
    unit, (seconds, _) = next(one for one in _UNITS.items() if span >= one[1][1])

    def place(at: float) -> float:
        return (at - start) / seconds

    axes = figure.subplots()
    begins = [number for number, change in enumerate(changes) if change.begins or not number]
    for first, after in zip(begins, [*begins[1:], len(changes)], strict=True):
        part = changes[first:after]
        # A run that a later one goes on from ended at a time that nobody has written down.
        end = until if after == len(changes) else part[-1].at
        at = [*(place(change.at) for change in part), place(end)]
        workers = [*(change.workers for change in part), part[-1].workers]
        axes.step(at, workers, where="post", color=_LINE, linewidth=2)
        _mark(axes, part, place)
    axes.set_ylim(0, max(change.workers for change in changes) + 0.6)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title("workers", loc="left", fontweight="bold", color=TEXT)
    axes.set_xlabel(f"{unit} since the beginning")
    plain(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, labelcolor=TEXT, loc="lower right")


def _mark(axes: Any, part: Sequence[Change], place: Any) -> None:
    lost: list[Change] = []
    joined: list[Change] = []
    for before, change in pairwise(part):
        if change.workers < before.workers + change.joined:
            lost.append(change)
        if change.joined:
            joined.append(change)
    named = axes.get_legend_handles_labels()[1]
    for label, marker, colour, found in (
        ("lost", "v", _LOST, lost),
        ("joined", "^", _JOINED, joined),
    ):
        if found:
            axes.plot(
                [place(change.at) for change in found],
                [change.workers for change in found],
                marker,
                color=colour,
                markersize=7,
                label=label if label not in named else None,
            )
