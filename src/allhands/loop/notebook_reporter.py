"""What the user of a notebook sees while a training runs: a bar and curves that are drawn anew in
their place, and the table of epochs below them."""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from allhands.loop.announce import duration
from allhands.loop.loggers import wanted
from allhands.loop.reporter import TableReporter
from allhands.report.curves import Curve, curves_figure
from allhands.report.figures import has_matplotlib

_WIDTH = 115  # columns of a cell's output
# Curves are drawn again after so many times what drawing them has taken.
_PAUSE = 10


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


class NotebookReporter(TableReporter):
    """Prints lines and rows into the output of the cell.

    Args:
        verbose: show a bar, and curves with a point for each row.
    """

    def __init__(self, verbose: bool) -> None:
        columns = os.environ.get("COLUMNS", "")
        super().__init__((int(columns) if columns.isdigit() else 0) or _WIDTH)
        self.shows_bar = verbose
        self._bar: Any = None
        self._curves = _LiveCurves() if verbose and wanted() else None
        self._begun: tuple[str, int, float] = "", 0, 0.0

    def line(self, text: str) -> None:
        print(text)

    def progress(
        self, label: str, done: int, total: int | None, loss: float | None, note: str = ""
    ) -> None:
        if not self.shows_bar:
            return
        if self._begun[0] != label or done < self._begun[1]:
            self._begun = label, done, time.monotonic()
        _, first, since = self._begun
        of = "" if total is None else f"/{total}"
        said = [f"{label} {done}{of}"]
        if total is not None and done > first:
            left = (total - done) * (time.monotonic() - since) / (done - first)
            said.append(f"{duration(left)} left")
        said += ["" if loss is None else f"loss {loss:.4f}", note]
        text = "  ".join(filter(None, said))
        at = "" if total is None else f' value="{done}" max="{total}"'
        bar = f'<progress style="width:24em;max-width:100%"{at}></progress>'
        shown = f'{bar} <span style="white-space:pre">{html.escape(text)}</span>'
        self._show({"text/plain": text, "text/html": shown})

    def row(self, header: Sequence[str], cells: Sequence[str], values: Sequence[Any]) -> None:
        if self.shows_bar and self._bar is None:
            self._show({"text/plain": ""})
        super().row(header, cells, values)
        if self._curves is not None:
            self._curves.add(header, values)

    def _show(self, data: dict[str, str]) -> None:
        from IPython.display import display

        if self._bar is not None:
            self._bar.update(data, raw=True)
            return
        self._bar = display(data, raw=True, display_id=True)
        if self._curves is not None:
            self._curves.take_place()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.update({"text/plain": ""}, raw=True)
        if self._curves is not None:
            self._curves.draw()


class _LiveCurves:
    """The curves of the rows so far, in one place of the cell's output."""

    def __init__(self) -> None:
        self._place: Any = None
        self._label, self._at = "", list[float]()
        self._found: dict[str, dict[str, Curve]] = {}
        self._drawn = 0  # rows
        self._next = 0.0

    def take_place(self) -> None:
        """What is shown later is shown here."""
        from IPython.display import display

        if has_matplotlib():
            self._place = display({"text/plain": ""}, raw=True, display_id=True)
        else:
            print("note: live curves need matplotlib: pip install 'allhands[report]'")

    def add(self, header: Sequence[str], values: Sequence[Any]) -> None:
        """Take a row; its first column is what curves are drawn over."""
        self._label, number = header[0], len(self._at)
        self._at.append(float(values[0]))
        for column, value in zip(header, values, strict=True):
            loader, _, name = column.partition(" ")
            if name:
                rows, known = self._found.setdefault(name, {}).setdefault(loader, ([], []))
                rows.append(number)
                known.append(float(value))
        if number and time.monotonic() >= self._next:
            self.draw()

    def draw(self) -> None:
        """Show the rows that were not shown yet."""
        if self._place is None or not self._found or self._drawn == len(self._at):
            return
        self._drawn, began = len(self._at), time.monotonic()
        self._place.update(curves_figure({self._label: self._at}, self._found))
        now = time.monotonic()
        self._next = now + _PAUSE * (now - began)
