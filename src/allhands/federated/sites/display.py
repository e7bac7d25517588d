"""What the operator of a server sees: a table of the sites and a line for each event, live in a
terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_KEPT = 8  # lines under the table
# What events of these kinds tell of was said by a site itself.
_SAID = ("greeted", "refused", "update", "bad", "failed", "evaluated")
_COLUMNS = ("samples", "rounds", "loss", "accuracy", "seconds", "MB", "refused", "failed", "late")


@dataclass
class SiteRow:
    """What is known of a site. `state` is what it does now, `rounds` how many of its updates are in
    the model, `heard` when it last said something, in seconds since 1970."""

    state: str = "missing"
    samples: int | None = None
    rounds: int = 0
    loss: float | None = None
    accuracy: float | None = None
    seconds: float | None = None
    bytes: int = 0
    refused: int = 0
    failed: int = 0
    late: int = 0
    heard: float | None = None


class StatusTable:
    """The sites and the rounds, as far as events have told."""

    def __init__(self) -> None:
        self.rows: dict[str, SiteRow] = {}
        self.round, self.rounds = 0, 0
        self.values: Mapping[str, Any] = {}
        self.reason: str | None = None
        #: The events of the rounds that have ended.
        self.finished: list[Mapping[str, Any]] = []
        self._since: dict[str, float] = {}  # when a site was asked, or missed

    def take(self, event: Mapping[str, Any]) -> str | None:
        """Take an event in; the line that it is worth, or None."""
        kind, site = event["kind"], event.get("site", "")
        row = self.rows.get(site) or SiteRow()
        # Once the sites are known, whoever has another name gets a line and no row.
        if site and not self.rounds:
            row = self.rows.setdefault(site, row)
        when = event.get("time", 0.0)
        if kind in _SAID:
            row.heard = when
        where = f"round {event['round'] + 1}: " if isinstance(event.get("round"), int) else ""
        if kind == "begin":
            self.rows = {
                name: self.rows.get(name, SiteRow()) for name in event["sites"]
            } | self.rows
            self.round, self.rounds = event["round"], event["rounds"]
            for name in event["sites"]:
                self._since.setdefault(name, when)
            return (
                f"{len(event['sites'])} sites, {event['rounds']} rounds of "
                f"{event['algorithm']}; a round needs {event['needed']}"
            )
        if kind == "waiting":
            for name in event["missing"]:
                self.rows.setdefault(name, SiteRow()).state = "missing"
                self._since.setdefault(name, when - event["seconds"])
            return f"waiting for {', '.join(event['missing'])} ({event['seconds']:.0f} s)"
        if kind == "stranger":
            return f"a node that is no site of this run: {event['reason']}"
        if kind == "greeted":
            row.state, row.samples = "ready", event["samples"]
            self._since.pop(site, None)
            return f"{site} takes part: {event['samples']} samples"
        if kind == "refused":
            row.state = "refused"
            return f"{site} is refused: {event['reason']}"
        if kind == "left":
            row.state = "gone"
            self._since[site] = when
            return f"{site} has left: {event['reason']}"
        if kind == "round":
            self.round = event["round"]
            for name in event["cohort"]:
                self.rows.setdefault(name, SiteRow()).state = "training"
                self._since[name] = when
            absent = event.get("absent")
            return f"{where}without {', '.join(absent)}, not connected" if absent else None
        if kind == "update":
            row.state, row.loss, row.seconds = "ready", event["loss"], event["seconds"]
            row.rounds, row.bytes = row.rounds + 1, row.bytes + event["bytes"]
            return None
        if kind in ("bad", "failed", "late"):
            return self._amiss(row, event, f"{where}{site}")
        if kind == "dropped":
            return f"{where}a reply of {site} that nobody waits for any more: {event['reason']}"
        if kind == "evaluated":
            row.accuracy = event.get("accuracy")
            return None
        if kind == "round_end":
            self.round, self.values = event["round"] + 1, event.get("values") or {}
            self.finished.append(event)
            loss = event.get("loss")
            said = [f"{where}{len(event['brought'])} sites in {event['seconds']:.1f} s"]
            said += [f"loss {loss:.4g}"] if loss is not None else []
            said += [
                f"{name}: "
                + " ".join(
                    f"{key} {value:.4g}" for key, value in found.items() if value is not None
                )
                for name, found in self.values.items()
            ]
            return ", ".join(said)
        if kind == "end":
            self.reason = event["reason"]
            return f"the run has ended: {event['reason']}"
        return None

    def _amiss(self, row: SiteRow, event: Mapping[str, Any], who: str) -> str:
        row.state = event["kind"]
        if event["kind"] == "late":
            row.late += 1
            return f"{who} has sent nothing within {event['seconds']:.0f} s and is left out"
        if event["kind"] == "bad":
            row.refused += 1
            return f"{who}: its update is refused: {event['reason']}"
        row.failed += 1
        return f"{who} failed: {event['reason']}"

    def title(self) -> str:
        if not self.rounds:
            return "waiting for the first round"
        return f"round {min(self.round + 1, self.rounds)} of {self.rounds}"

    def waited_for(self, now: float) -> tuple[list[str], list[str]]:
        """The sites that train now, and those that are silent and why, each with the seconds."""
        silent = {"missing": "not connected", "gone": "has left", "late": "nothing came in time"}
        trains, others = [], []
        for name, row in self.rows.items():
            seconds = f"{max(0.0, now - self._since.get(name, now)):.0f} s"
            if row.state == "training":
                trains.append(f"{name} ({seconds})")
            elif row.state in silent:
                others.append(f"{name} ({silent[row.state]}, {seconds})")
        return ([], []) if self.reason is not None else (trains, others)

    def cells(self, now: float | None = None) -> tuple[list[str], list[list[str]]]:
        """The sites, one a row, with the names of the columns; `now`: also how long ago each was
        last heard."""
        rows = []
        for name, row in self.rows.items():
            figures = (row.samples, row.rounds, row.loss, row.accuracy, row.seconds)
            counts = (row.refused, row.failed, row.late)
            ago = "" if now is None or row.heard is None else f"{max(0.0, now - row.heard):.0f} s"
            cells = [*map(_short, figures), f"{row.bytes / 1e6:.1f}", *map(str, counts)]
            rows.append([name, row.state, *([] if now is None else [ago]), *cells])
        return ["site", "state", *([] if now is None else ["heard before"]), *_COLUMNS], rows

    def table(self) -> Table:
        """The sites, one a line."""
        table = Table(title=self.title(), title_justify="left")
        header, rows = self.cells()
        for name in header:
            table.add_column(name, justify="left" if name in ("site", "state") else "right")
        for row in rows:
            table.add_row(*map(Text, row))
        return table


class Display:
    """Shows events: live in a terminal, and elsewhere as a line each. Used as a context."""

    def __init__(self, console: Console | None = None) -> None:
        # A file has no width, and rich would take it for a narrow terminal.
        self.console = console or Console(
            highlight=False, width=None if sys.stdout.isatty() else 140
        )
        self.status = StatusTable()
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live = Live(
                self._picture(), console=self.console, refresh_per_second=4, transient=False
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self.status.rows:
            self.console.print(self.status.table())

    def take(self, event: Mapping[str, Any]) -> None:
        """Show an event."""
        line = self.status.take(event)
        if line is not None:
            self.say(line, event["time"])
        elif self._live is not None:
            self._live.update(self._picture())

    def say(self, line: str, when: float | None = None) -> None:
        """Show a line."""
        line = said_at(line, when)
        if self._live is None:
            self.console.print(line, soft_wrap=True, markup=False)
            return
        self._lines.append(line)
        self._live.update(self._picture())

    def _picture(self) -> Group:
        return Group(self.status.table(), Text("\n".join(self._lines)))


def said_at(line: str, when: float | None = None) -> str:
    """A line behind the time of day; None: now."""
    return f"{time.strftime('%H:%M:%S', time.localtime(when))} {line}"


def _short(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
