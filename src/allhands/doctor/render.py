"""Writes the findings down: a table for a reader, JSON for a program."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from allhands.doctor.finding import TOGETHER, Report

# Raised when a key goes away or means something else; new keys may come at any time.
FORMAT = 1
_MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def as_json(report: Report) -> str:
    """The report as one JSON object; the documentation lists its keys."""
    told: dict[str, Any] = {
        "format": FORMAT,
        "ok": not report.problems,
        "problems": len(report.problems),
        "warnings": len(report.warnings),
        "seconds": round(report.seconds, 2),
        "hosts": list(report.hosts),
        "findings": [asdict(finding) for finding in report.findings],
    }
    return json.dumps(told, indent=1, ensure_ascii=False)


def show(report: Report) -> None:
    """Print a table a host, then what to do about the problems and warnings."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for host in [*report.hosts, TOGETHER]:
        findings = [finding for finding in report.findings if finding.host == host]
        if not findings:
            continue
        table = Table(
            title=host or "together", title_justify="left", title_style="bold", show_header=False
        )
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            text = Text(finding.found)
            if finding.advice and finding.status == "ok":
                text.append(f"\n{finding.advice}", style="dim")
            table.add_row(
                finding.check, Text(_MARKS[finding.status], style=_COLOURS[finding.status]), text
            )
        console.print(table)
    for finding in [*report.warnings, *report.problems]:
        title = f"{_MARKS[finding.status]} {finding.check}" + (
            f" on {finding.host}" if finding.host else ""
        )
        console.print(Text(f"{title}: {finding.found}", style=_COLOURS[finding.status]))
        if finding.advice:
            console.print(Padding(Text(f"-> {finding.advice}"), (0, 0, 0, 2)))
    count = f"{len(report.problems)} problem{'s' * (len(report.problems) != 1)}, "
    count += f"{len(report.warnings)} warning{'s' * (len(report.warnings) != 1)}"
    console.print(f"{count} ({report.seconds:.1f} s)")
