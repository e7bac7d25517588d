"""What a notebook's cell shows of a training."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.loop import notebook_reporter
from allhands.loop.notebook_reporter import NotebookReporter, in_notebook

pytest.importorskip("IPython")
pytest.importorskip("matplotlib")

HEADER = ["epoch", "train loss", "valid loss", "lr", "best"]


class Place:
    """A place in the output: what it has shown, in order."""

    def __init__(self, first: Any) -> None:
        self.shown = [first]

    def update(self, data: Any, **_: Any) -> None:
        self.shown.append(data)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    monkeypatch.setenv("ALLHANDS_CURVES", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    found: list[Place] = []

    def display(data: Any, **_: Any) -> Place:
        found.append(Place(data))
        return found[-1]

    monkeypatch.setattr("IPython.display.display", display)
    return found


def row(reporter: NotebookReporter, number: int) -> None:
    values = [number, 1 / number, 2 / number, 0.1, True]
    reporter.row(HEADER, [f"{number}/9", *map(str, values[1:])], values)


def test_the_bar_says_how_far_and_how_long(
    places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(notebook_reporter.time, "monotonic", lambda: now)
    reporter = NotebookReporter(verbose=True)
    reporter.progress("1/9 train", 10, 50, 0.5)
    now += 20
    reporter.progress("1/9 <train>", 1, 50, None)
    now += 2
    reporter.progress("1/9 <train>", 11, 50, 0.25, "5 samples/s")
    reporter.progress("2/9 stream", 11, None, 0.25)
    texts = [data["text/plain"] for data in places[0].shown]
    assert texts == [
        "1/9 train 10/50  loss 0.5000",
        "1/9 <train> 1/50",
        "1/9 <train> 11/50  8s left  loss 0.2500  5 samples/s",
        "2/9 stream 11  loss 0.2500",
    ]
    assert 'value="11" max="50"' in places[0].shown[2]["text/html"]
    assert "&lt;train&gt;" in places[0].shown[2]["text/html"]
    assert "value" not in places[0].shown[3]["text/html"]
    reporter.close()
    assert places[0].shown[-1] == {"text/plain": ""}


def test_curves_grow_in_their_place_and_take_little_of_the_time(
    places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(notebook_reporter.time, "monotonic", lambda: now)
    drawn = notebook_reporter.curves_figure

    def slowly(*given: Any) -> Any:
        nonlocal now
        now += 1
        return drawn(*given)

    monkeypatch.setattr(notebook_reporter, "curves_figure", slowly)
    reporter = NotebookReporter(verbose=True)
    for number in range(1, 8):  # a row every four seconds
        row(reporter, number)
        now += 4
    reporter.close()
    reporter.close()
    _, curves = places
    figures = curves.shown[1:]
    lines = [[list(line.get_xdata()) for line in figure.axes[0].lines] for figure in figures]
    assert [len(train) for train, _ in lines] == [2, 5, 7]
    assert lines[-1] == [[1, 2, 3, 4, 5, 6, 7]] * 2
    assert figures[-1].axes[0].get_xlabel() == "epoch"


def test_without_verbose_it_prints_rows_alone(
    places: list[Place], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not in_notebook()
    reporter = NotebookReporter(verbose=False)
    assert not reporter.shows_bar
    reporter.progress("1/9 train", 10, 50, 0.5)
    row(reporter, 1)
    row(reporter, 2)
    reporter.close()
    assert places == []
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "epoch",
        "1/9",
        "2/9",
    ]


def test_without_matplotlib_it_says_what_is_missing(
    places: list[Place], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notebook_reporter, "has_matplotlib", lambda: False)
    reporter = NotebookReporter(verbose=True)
    for number in (1, 2):
        row(reporter, number)
    reporter.close()
    assert len(places) == 1
    assert capsys.readouterr().out.count("pip install 'allhands[report]'") == 1
