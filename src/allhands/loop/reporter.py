"""What the user sees while a training runs: a few lines at the start, a bar, and a table with one
row an epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from allhands.launch import worker
from allhands.world import World
from allhands.world.regroup import began_with


class Reporter:
    """Says nothing; what ranks other than 0 use."""

    #: Whether anybody would see a progress bar.
    shows_bar = False

    def line(self, text: str) -> None:
        """One line of information."""

    def progress(self, label: str, done: int, total: int | None, loss: float | None) -> None:
        """How far the current loader is; `total` is None when only reading tells."""

    def row(self, header: Sequence[str], cells: Sequence[str]) -> None:
        """One row of the table of epochs."""

    def close(self) -> None:
        """Take the bar off the screen."""


class ConsoleReporter(Reporter):
    """Prints to standard output; draws the bar only on a terminal or in a notebook."""

    def __init__(self, verbose: bool) -> None:
        from rich.console import Console

        # A width is assumed where there is no terminal, so that rows in a log file are not broken.
        interactive = Console().is_interactive or Console().is_jupyter
        self.console = Console(width=None if interactive else 200, highlight=False, soft_wrap=True)
        self.shows_bar = verbose and interactive
        self._bar: Any = None
        self._task: Any = None
        self._header: tuple[str, ...] | None = None

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    def progress(self, label: str, done: int, total: int | None, loss: float | None) -> None:
        if not self.shows_bar:
            return
        if self._bar is None:
            self._start_bar()
        shown = "" if loss is None else f"loss {loss:.4f}"
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

        # No refresh thread: the training loop itself redraws, a few times a second.
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
            console=self.console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, loss="")
        self._bar.start()

    def row(self, header: Sequence[str], cells: Sequence[str]) -> None:
        self.close()
        widths = [max(len(name), 9) for name in header]
        if tuple(header) != self._header:
            self._header = tuple(header)
            self.line(
                "  ".join(name.rjust(width) for name, width in zip(header, widths, strict=True))
            )
        self.line("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if sys.stdout is not None:  # as in a service
            sys.stdout.flush()


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

    def progress(self, label: str, done: int, total: int | None, loss: float | None) -> None:
        if self._world.rank == 0:
            self._reporter.progress(label, done, total, loss)

    def row(self, header: Sequence[str], cells: Sequence[str]) -> None:
        if self._world.rank == 0:
            self._reporter.row(header, cells)

    def close(self) -> None:
        if self._world.rank == 0:
            self._reporter.close()


def reporter_of(world: World, make: Callable[[], Reporter]) -> Reporter:
    """What `make` gives, on rank 0; nothing is said on the others."""
    if began_with() is not None:
        return FirstRankReporter(world, make())
    return make() if world.rank == 0 else Reporter()


class ForwardingReporter(Reporter):
    """Used in a worker that `train(distributed=…)` has started: the parent process prints."""

    def __init__(self, shows_bar: bool) -> None:
        self.shows_bar = shows_bar

    def line(self, text: str) -> None:
        worker.send({"report": "line", "args": [text]})

    def progress(self, label: str, done: int, total: int | None, loss: float | None) -> None:
        worker.send({"report": "progress", "args": [label, done, total, loss]})

    def row(self, header: Sequence[str], cells: Sequence[str]) -> None:
        worker.send({"report": "row", "args": [list(header), list(cells)]})

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
