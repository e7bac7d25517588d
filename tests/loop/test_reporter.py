"""What is printed of a training: rows that fit, and lines for programs."""

from __future__ import annotations

import json
import math
import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner
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


COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[0-9;]*m")


def train() -> None:
    model = torch.nn.Linear(2, 1)
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=torch.nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(data, 4)},
        num_epochs=2,
        verbose=True,
    )


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A terminal to write to, and what gives what it has got."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as file, os.fdopen(ours, "rb", buffering=0) as reader:

        def read() -> str:
            file.flush()
            found = b""
            while select.select([reader], [], [], 0)[0]:
                found += reader.read(65_536)
            return found.decode()

        yield file, read


def test_a_terminal_shows_a_bar_in_colours_but_for_no_color(
    terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = terminal
    monkeypatch.setattr(sys, "stdout", file)
    train()
    text = read()
    assert "1/2 train" in text
    assert COLOUR.search(text)
    monkeypatch.setenv("NO_COLOR", "1")
    train()
    text = read()
    assert "1/2 train" in text
    assert not COLOUR.search(text)
    monkeypatch.setenv("TERM", "dumb")
    train()
    text = read()
    assert "1/2 train" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("force", ["", "1"])
def test_a_training_in_a_pipe_has_no_bar_and_no_colours(
    force: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", force)
    monkeypatch.setenv("TERM", "xterm-256color")
    train()
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\r" not in text
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["1/2", "2/2"]


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
