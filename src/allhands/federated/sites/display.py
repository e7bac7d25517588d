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


@dataclass
class SiteRow:
    """What is known of a site. `state` is what it does now, `rounds` how many of its updates are in
    the model."""

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


class StatusTable:
    """The sites and the rounds, as far as events have told."""

    def __init__(self) -> None:
        self.rows: dict[str, SiteRow] = {}
        self.round, self.rounds = 0, 0
        self.values: Mapping[str, Any] = {}
        self.reason: str | None = None
        self._asked: list[str] = []

    def take(self, event: Mapping[str, Any]) -> str | None:
        """Take an event in; the line that it is worth, or None."""
        kind, site = event["kind"], event.get("site", "")
        row = self.rows.get(site) or SiteRow()
        # Once the sites are known, whoever has another name gets a line and no row.
        if site and not self.rounds:
            row = self.rows.setdefault(site, row)
        where = f"round {event['round'] + 1}: " if isinstance(event.get("round"), int) else ""
        if kind == "begin":
            self.rows = {
                name: self.rows.get(name, SiteRow()) for name in event["sites"]
            } | self.rows
            self.round, self.rounds = event["round"], event["rounds"]
            return (
                f"{len(event['sites'])} sites, {event['rounds']} rounds of "
                f"{event['algorithm']}; a round needs {event['needed']}"
            )
        if kind == "waiting":
            for name in event["missing"]:
                self.rows.setdefault(name, SiteRow()).state = "missing"
            return f"waiting for {', '.join(event['missing'])} ({event['seconds']:.0f} s)"
        if kind == "stranger":
            return f"a node that is no site of this run: {event['reason']}"
        if kind == "greeted":
            row.state, row.samples = "ready", event["samples"]
            return f"{site} takes part: {event['samples']} samples"
        if kind == "refused":
            row.state = "refused"
            return f"{site} is refused: {event['reason']}"
        if kind == "left":
            row.state = "gone"
            return f"{site} has left: {event['reason']}"
        if kind == "round":
            self.round = event["round"]
            for name in event["cohort"]:
                self.rows.setdefault(name, SiteRow()).state = "training"
            absent = event.get("absent")
            return f"{where}without {', '.join(absent)}, which are not there" if absent else None
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

    def table(self) -> Table:
        """The sites, one a line."""
        title = (
            f"round {min(self.round + 1, self.rounds)} of {self.rounds}"
            if self.rounds
            else "waiting for the first round"
        )
        table = Table(title=title, title_justify="left")
        for name in (
            "site",
            "state",
            "samples",
            "rounds",
            "loss",
            "accuracy",
            "seconds",
            "MB",
            "refused",
            "failed",
            "late",
        ):
            table.add_column(name, justify="left" if name in ("site", "state") else "right")
        for name, row in self.rows.items():
            table.add_row(
                Text(name),
                row.state,
                _short(row.samples),
                str(row.rounds),
                _short(row.loss),
                _short(row.accuracy),
                _short(row.seconds),
                f"{row.bytes / 1e6:.1f}",
                str(row.refused),
                str(row.failed),
                str(row.late),
            )
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
        clock = time.strftime("%H:%M:%S", time.localtime(when))
        if self._live is None:
            self.console.print(f"{clock} {line}", soft_wrap=True, markup=False)
            return
        self._lines.append(f"{clock} {line}")
        self._live.update(self._picture())

    def _picture(self) -> Group:
        return Group(self.status.table(), Text("\n".join(self._lines)))


def _short(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
