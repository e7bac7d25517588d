"""What `allhands.verify` gives back: a table with one row for each strategy and number of
workers."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allhands.report import has_matplotlib, new_figure, save_figure
from allhands.report.page import as_written, picture, wide
from allhands.report.table_layout import aligned

SAME, DIFFERS, LOSSY = "same", "DIFFERS", "lossy as declared"


@dataclass
class Row:
    """One strategy with one number of workers, against the same training alone.

    Attributes:
        strategy: its name, as `Strategy.in_words` gives it.
        workers: how many trained.
        verdict: "same", "DIFFERS", or "lossy as declared" for a strategy that says ``exact =
            False``.
        step: the first optimizer step that differs, counted from 1; None when none does.
        what: the quantity that differs there first; where none does, the one that comes nearest to
            it; "" when every bit is the same.
        difference: of that quantity: relative, in L2 norm; for samples and learning rates the
            difference itself; nan for what has no size (samples with other content, ranks that
            differ).
        noise: what rounding explains of it; 0 for what must be equal.
        causes: for "DIFFERS", why; each confirmed by what it says.
        curves: for the plot: by "gradients" and "parameters", the difference and the largest
            difference that counts as rounding, one number a step.
    """

    strategy: str
    workers: int
    verdict: str
    step: int | None
    what: str
    difference: float
    noise: float
    causes: list[str] = field(default_factory=list)
    curves: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def times(self) -> float:
        """The difference as a multiple of the noise."""
        return self.difference / self.noise if self.noise else math.nan


@dataclass
class Report:
    """The outcome of `allhands.verify`.

    Attributes:
        rows: one a strategy and number of workers.
        about: what was compared, in a line.
        notes: what else was noticed, about the training or about the comparison.
    """

    rows: list[Row]
    about: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No row differs by more than it may."""
        return all(row.verdict != DIFFERS for row in self.rows)

    def table(self) -> str:
        """The table, the causes below it, and the notes, as text."""
        header = [
            "strategy",
            "workers",
            "first differing step",
            "quantity",
            "difference",
            "noise",
            "times noise",
            "verdict",
        ]
        lines = [header]
        for row in self.rows:
            equal = math.isnan(row.difference)
            lines.append(
                [
                    row.strategy,
                    str(row.workers),
                    "-" if row.step is None else str(row.step),
                    row.what or "-",
                    "-" if equal else _number(row.difference),
                    "-" if equal or not row.noise else _number(row.noise),
                    "-" if math.isnan(row.times) else _number(row.times),
                    row.verdict,
                ]
            )
        parts = [self.about] if self.about else []
        parts += aligned(lines, left=(0, 3, 7))
        for row in self.rows:
            if row.causes:
                parts += [
                    "",
                    f"{row.strategy} with {row.workers} worker{'s' if row.workers > 1 else ''}:",
                ]
                parts += [_item(cause) for cause in row.causes]
        if self.notes:
            parts += ["", "Noticed:", *(_item(note) for note in self.notes)]
        return "\n".join(parts)

    def save_plot(self, path: str | Path) -> None:
        """Draw the differences of gradients and parameters by step, with what rounding explains,
        into a PNG.

        Raises:
            UserError: matplotlib is not installed, or the file cannot be written.
        """
        figure = new_figure(9, 4)
        self.draw(figure)
        save_figure(figure, path)

    def draw(self, figure: Any) -> None:
        """Draw what `save_plot` writes into a figure of matplotlib's."""
        axes: Any = figure.subplots(1, 2, sharey=True)
        for one, kind in zip(axes, ("gradients", "parameters"), strict=True):
            for number, row in enumerate(self.rows):
                curves = row.curves.get(kind, {"difference": [], "limit": []})
                steps = range(1, len(curves["difference"]) + 1)
                # A difference of 0 has no place on this scale; a gap shows it.
                shown = [value if value > 0 else math.nan for value in curves["difference"]]
                name = (
                    f"{row.strategy}, {row.workers} worker{'s' if row.workers > 1 else ''}: "
                    f"{row.verdict}"
                )
                exact = " (every bit)" if not any(curves["difference"]) else ""
                one.plot(
                    steps, shown, marker="o", markersize=3, color=f"C{number}", label=name + exact
                )
                one.plot(
                    steps,
                    curves["limit"],
                    linestyle="--",
                    linewidth=1,
                    color=f"C{number}",
                    alpha=0.6,
                )
            one.set(title=f"all {kind}", xlabel="optimizer step", yscale="log")
            one.xaxis.get_major_locator().set_params(integer=True)
            one.grid(alpha=0.3)
        axes[0].set_ylabel("difference from one process, relative")
        axes[0].plot([], [], "k--", linewidth=1, label="most that rounding explains")
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=2,
            fontsize="small",
            frameon=False,
        )

    def section(self) -> str:
        """A part of a page: the table, and the plot where matplotlib is installed."""
        table = as_written(self.table())
        if not has_matplotlib():
            return table
        what = "differences of gradients and parameters by step"
        return table + wide(picture(self.draw, (9, 4), what))


def _number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.2g}" if 0.01 <= abs(value) < 1e5 else f"{value:.1e}"


def _item(text: str) -> str:
    return textwrap.fill(
        text, 118, initial_indent="  * ", subsequent_indent="    ", break_long_words=False
    )
