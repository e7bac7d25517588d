"""What is printed of a training: rows that fit, and lines for programs."""

from __future__ import annotations

import json
import math

import pytest

from allhands.errors import UserError
from allhands.loop.announce import duration, report_epoch
from allhands.loop.reporter import ConsoleReporter, JsonReporter, Reporter
from allhands.loop.reporter_choice import console

VALUES = {
    "train": {"loss": 0.5, "accuracy": 0.25},
    "valid": {"loss": math.nan, "accuracy": 1.25e-05},
}


def rows(capsys: pytest.CaptureFixture[str], reporter: Reporter) -> list[str]:
    for epoch in (1, 100):
        report_epoch(reporter, "epoch", f"{epoch}/100", VALUES, 1e-3, 2.5, epoch == 100, 500, 75.0)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, None])
def test_rows_fit_and_are_aligned_at_the_right(width, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    lines = rows(capsys, ConsoleReporter(verbose=True))
    assert max(map(len, lines)) <= (width or 200)
    first, last = (line for line in lines if "/100" in line)
    assert last.endswith("     *")
    assert first == last[: len(first)].replace("100/100", "  1/100")
    header = next(line for line in lines if "epoch" in line)
    for end in (i + len("loss") for i in range(len(header)) if header[i:].startswith("loss")):
        assert first[end - 6 : end] in ("0.5000", "   nan")
    left_out = [line for line in lines if line.startswith("(no room for")]
    assert len(left_out) == (width in (60, 80))
    if width is None:
        assert header.split()[-5:] == ["lr", "seconds", "samples/s", "left", "best"]
        assert last.split()[-5:] == ["0.001", "2.50", "200", "1:15", "*"]


def test_another_header_begins_another_table(capsys):
    reporter = ConsoleReporter(verbose=False)
    reporter.row(["epoch", "train loss"], ["1/2", "0.1000"], [1, 0.1])
    reporter.row(["epoch", "train loss", "x"], ["2/2", "0.1000", "1"], [2, 0.1, 1])
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_pipe_has_no_bar_and_no_colours(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    reporter = ConsoleReporter(verbose=True)
    assert not reporter.shows_bar
    reporter.progress("1/2 train", 1, 10, 0.5, "note")
    reporter.line("x" * 300)
    assert capsys.readouterr().out == "x" * 300 + "\n"


def test_programs_get_lines_of_json_with_whole_numbers_and_nulls(monkeypatch, capsys):
    monkeypatch.setenv("ALLHANDS_OUTPUT", "json")
    reporter = console(verbose=True)
    assert isinstance(reporter, JsonReporter)
    reporter.line("begun …")
    lines = [json.loads(line) for line in rows(capsys, reporter)]
    assert lines[0] == {"line": "begun …"}
    assert lines[2]["row"] == {
        "epoch": 100,
        "train loss": 0.5,
        "train accuracy": 0.25,
        "valid loss": None,
        "valid accuracy": 1.25e-05,
        "lr": 1e-3,
        "seconds": 2.5,
        "samples/s": 200.0,
        "left": 75.0,
        "best": True,
    }


def test_quiet_prints_nothing_and_other_words_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("ALLHANDS_OUTPUT", "quiet")
    assert rows(capsys, console(verbose=True)) == []
    monkeypatch.setenv("ALLHANDS_OUTPUT", "yaml")
    with pytest.raises(UserError, match="ALLHANDS_OUTPUT='yaml'; write quiet or json"):
        console(verbose=True)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59, "59s"), (185, "3:05"), (7800, "2:10:00")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
