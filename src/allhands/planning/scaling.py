"""The best of each strategy over the number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allhands.checks import check_whole
from allhands.planning.candidates import Candidate, candidates
from allhands.planning.derived_steps import DerivedSteps, Taken
from allhands.planning.forecast import Prediction
from allhands.planning.forked import in_forked
from allhands.report.figures import new_figure, save_figure
from allhands.report.scaling_plot import draw_scaling

#: Numbers of GPUs that are looked at.
SIZES = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 10000)


@dataclass(frozen=True)
class ScalingPlan:
    """The fastest that fits of each strategy on several numbers of GPUs.

    Attributes:
        curves: by strategy, each number of GPUs with what it would take there, growing; where it
            does not fit, or cannot train the model, the number is not there.
        limit: bytes of a card.
        card: its name.
    """

    curves: dict[str, list[tuple[int, Prediction]]]
    limit: float
    card: str

    def plot(self, path: str | Path | None = None) -> Any:
        """As `TrainingPlan.plot`."""
        figure = new_figure(14, 4.8)
        times, speed, memory = figure.subplots(1, 3)
        numbers = {name: [gpus for gpus, _ in curve] for name, curve in self.curves.items()}
        seconds = {
            name: [1e3 * row.seconds.total for _, row in curve if row.seconds is not None]
            for name, curve in self.curves.items()
        }
        peaks = {name: [row.peak / 1e9 for _, row in curve] for name, curve in self.curves.items()}
        speeds = {
            name: [row.samples_per_second for _, row in curve]
            for name, curve in self.curves.items()
        }
        draw_scaling(times, numbers, seconds, "ms of a step", None)
        draw_scaling(speed, numbers, speeds, "samples a second", None)
        draw_scaling(memory, numbers, peaks, f"GB of the fullest {self.card}", self.limit / 1e9)
        handles, labels = times.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
        if path is not None:
            save_figure(figure, path)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain data, as `TrainingPlan.to_dict`."""
        return {
            name: [{"gpus": gpus, **row.to_dict()} for gpus, row in curve]
            for name, curve in self.curves.items()
        }


def scaling(
    look: Callable[[Candidate, int, Taken], list[Prediction]],
    numbers: Sequence[int],
    per_host: int,
    limit: float,
    card: str,
    processes: int,
) -> ScalingPlan:
    """Look at all strategies on several numbers of GPUs.

    Args:
        look: predicts one on a number of GPUs by steps that are given.
        numbers: of GPUs.
        per_host: GPUs of a host.
        limit: bytes of a card.
        card: its name.
        processes: as for `in_forked`.
    """
    families: dict[str, list[tuple[int, Candidate]]] = {}
    for number in sorted(set(numbers)):
        check_whole("gpus", number)
        for one in candidates(number, per_host):
            families.setdefault(one.family(number), []).append((number, one))

    def curve(family: str) -> list[tuple[int, Prediction]]:
        take = DerivedSteps()
        found = []
        for number, one in families[family]:
            fitting = [row for row in look(one, number, take) if row.fits]
            if fitting:
                best = max(fitting, key=lambda row: row.samples_per_second)
                found.append((number, best))
        return found

    names = list(families)
    curves = dict(zip(names, in_forked(curve, names, processes), strict=True))
    return ScalingPlan({name: found for name, found in curves.items() if found}, limit, card)
