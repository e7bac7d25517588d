"""Prints the table at the end of a run, from what the tests of its columns have recorded."""

from __future__ import annotations

from typing import Any

MARKS = {"equal": "=", "refused": "-", "declared": "~", "wrong": "WRONG"}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])
    ]
    found = [
        value
        for report in reports
        for name, value in report.user_properties
        if name == "conformance"
    ]
    if not found:
        return
    table: dict[str, dict[str, str]] = {}
    for column, kinds in found:  # a column may be tried in parts
        table.setdefault(column, {}).update(kinds)
    rows = list(dict.fromkeys(row for kinds in table.values() for row in kinds))
    width = max(map(len, rows))
    terminalreporter.section("what works with what: = equal to a plain loop, - refused by name")
    for number, column in enumerate(table):
        terminalreporter.line(" " * width + "  " + "|  " * number + column)
    for row in rows:
        terminalreporter.line(
            f"{row:{width}s}  "
            + "  ".join(MARKS[kinds[row]] if row in kinds else " " for kinds in table.values())
        )
