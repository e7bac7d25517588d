"""What the user sees while a training runs: a few lines at the start, a bar, and a table with one
row an epoch."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from allhands.launch import worker
from allhands.report.table_layout import TableLayout
from allhands.world import World

_LOG_FILE = 200  # columns where there is no terminal
_ROOM_FOR_NOTES = 100  # columns of a terminal


class Reporter:
    """Says nothing; what ranks other than 0 use."""

    #: Whether anybody would see a progress bar.
    shows_bar = False

    def line(self, text: str) -> None:
        """One line of information."""

    def progress(
        self, label: str, done: int, total: int | None, loss: float | None, note: str = ""
    ) -> None:
        """How far the current loader is; `total` is None when only reading tells. `note` is shown
        where there is room."""

    def row(self, header: Sequence[str], cells: Sequence[str], values: Sequence[Any]) -> None:
        """One row of the table of epochs; `values` are the cells' for programs."""

    def close(self) -> None:
        """Take the bar off the screen."""


class TableReporter(Reporter):
    """Prints rows as a table, in lines.

    Args:
        width: of the table, in characters.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._header: tuple[str, ...] | None = None
        self._layout: TableLayout | None = None
        self._said_left_out = ""

    def row(self, header: Sequence[str], cells: Sequence[str], values: Sequence[Any]) -> None:
        if tuple(header) != self._header or self._layout is None:
            self._header = tuple(header)
            self._layout = TableLayout(header, cells, self.width)
            for text in self._layout.header():
                self.line(text)
        self.line(self._layout.row(cells))
        left_out = ", ".join(self._layout.left_out)
        if left_out and left_out != self._said_left_out:
            self._said_left_out = left_out
            said = f"(no room for {left_out} in {self.width} columns)"
            self.line(textwrap.fill(said, self.width))


class ConsoleReporter(TableReporter):
    """Prints to standard output; draws the bar only on a terminal."""

    def __init__(self, verbose: bool) -> None:
        from rich.console import Console

        # With FORCE_COLOR, rich takes a pipe for a terminal.
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        interactive = is_terminal and Console().is_interactive
        # Where there is no terminal, rows in a log file are as wide as they need be, unless the
        # variable COLUMNS says otherwise.
        super().__init__(shutil.get_terminal_size((80 if interactive else _LOG_FILE, 24)).columns)
        # NO_COLOR, TERM=dumb and pipes are seen by rich.
        self.console = Console(
            width=None if interactive else max(self.width, _LOG_FILE),
            highlight=False,
            soft_wrap=True,
        )
        self.shows_bar = verbose and interactive
        self._bar: Any = None
        self._task: Any = None

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    def progress(
        self, label: str, done: int, total: int | None, loss: float | None, note: str = ""
    ) -> None:
        if not self.shows_bar:
            return
        if self._bar is None:
            self._start_bar()
        shown = "" if loss is None else f"loss {loss:.4f}"
        if note and self.console.width >= _ROOM_FOR_NOTES:
            shown = f"{shown}  {note}"
        self._bar.update(
            self._task, description=label, completed=done, total=total, loss=shown, refresh=True
        )
        if total is not None and done >= total:
            self.close()

    def _start_bar(self) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        # No refresh thread: the training loop itself redraws, a few times a second.
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}", table_column=Column(no_wrap=True)),
            console=self.console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, loss="")
        self._bar.start()

    def row(self, header: Sequence[str], cells: Sequence[str], values: Sequence[Any]) -> None:
        self.close()
        super().row(header, cells, values)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if sys.stdout is not None:  # as in a service
            sys.stdout.flush()


class JsonReporter(Reporter):
    """Prints lines of JSON: ``{"line": text}``, and ``{"row": {"epoch": 1, "train loss": 0.5}}``
    with NaN and infinity as null."""

    def line(self, text: str) -> None:
        _print_json({"line": text})

    def row(self, header: Sequence[str], cells: Sequence[str], values: Sequence[Any]) -> None:
        _print_json({"row": dict(zip(header, map(_plain, values), strict=True))})


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_json(message: dict[str, Any]) -> None:
    print(json.dumps(message, ensure_ascii=False), flush=True)


class FirstRankReporter(Reporter):
    """Of a rank whose number may change: says what it is told while that is 0."""

    def __init__(self, world: World, reporter: Reporter) -> None:
        self._world, self._reporter = world, reporter

    @property
    def shows_bar(self) -> bool:  # type: ignore[override]
        return self._world.rank == 0 and self._reporter.shows_bar

    def line(self, text: str) -> None:
        if self._world.rank == 0:
            self._reporter.line(text)

    def progress(
        self, label: str, done: int, total: int | None, loss: float | None, note: str = ""
    ) -> None:
        if self._world.rank == 0:
            self._reporter.progress(label, done, total, loss, note)

    def row(self, header: Sequence[str], cells: Sequence[str], values: Sequence[Any]) -> None:
        if self._world.rank == 0:
            self._reporter.row(header, cells, values)

    def close(self) -> None:
        if self._world.rank == 0:
            self._reporter.close()


class ForwardingReporter(Reporter):
    """Used in a worker that `train(distributed=…)` has started: the parent process prints."""

    def __init__(self, shows_bar: bool) -> None:
        self.shows_bar = shows_bar

    def line(self, text: str) -> None:
        worker.send({"report": "line", "args": [text]})

    def progress(
        self, label: str, done: int, total: int | None, loss: float | None, note: str = ""
    ) -> None:
        worker.send({"report": "progress", "args": [label, done, total, loss, note]})

    def row(self, header: Sequence[str], cells: Sequence[str], values: Sequence[Any]) -> None:
        worker.send({"report": "row", "args": [list(header), list(cells), list(values)]})

    def close(self) -> None:
        worker.send({"report": "close", "args": []})


def replay(message: dict[str, Any], reporter: Reporter) -> None:
    """Do in the parent what a `ForwardingReporter` was told in a worker."""
    if message.get("report") in ("line", "progress", "row", "close"):
        getattr(reporter, message["report"])(*message["args"])


class Pace:
    """Says when it is time to redraw: looks at the clock only every few steps, and is due a few
    times a second."""

    def __init__(self, interval: float = 0.2) -> None:
        self.interval = interval
        self.start()

    def start(self) -> None:
        """Begin a loader."""
        self.next_look = 1
        self._looked_at = 0
        self._last = time.perf_counter()

    def due(self, step: int) -> bool:
        """To be asked when `step` reaches `next_look`; also sets the next one."""
        now = time.perf_counter()
        elapsed, steps = now - self._last, max(1, step - self._looked_at)
        per_step = elapsed / steps
        self.next_look = (
            step + max(1, min(10_000, int(self.interval / per_step))) if per_step > 0 else step + 1
        )
        if elapsed < self.interval and step > 1:
            return False
        self._last, self._looked_at = now, step
        return True
