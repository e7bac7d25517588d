"""A history is a dict that shows itself."""

from __future__ import annotations

import copy
import importlib
import io
import json
import math
import pickle
from pathlib import Path

import pytest
import torch

from allhands.errors import UserError
from allhands.launch import results
from allhands.report.history import History, new_history


def written() -> History:
    history = new_history()
    for number in range(1, 5):
        row = {"epoch": number, "step": 10 * number, "lr": 0.1, "seconds": 1.25}
        values = {"train": {"loss": 1 / number}}
        if number % 2 == 0:
            values["valid"] = {"loss": math.nan if number == 2 else 0.5}
        history.add(row, values)
    return history


def test_it_is_a_dict() -> None:
    history = written()
    assert history["epoch"] == [1, 2, 3, 4]
    assert history["valid"]["loss"][1] == 0.5
    assert history == dict(history)
    assert json.loads(json.dumps(history))["train"]["loss"][3] == 0.25


def test_the_table_has_a_place_for_each_value() -> None:
    lines = [line.split() for line in repr(written()).splitlines()]
    assert lines[0] == ["epoch", "step", "lr", "seconds", "train", "loss", "valid", "loss"]
    assert [line[-1] for line in lines[1:]] == ["-", "nan", "-", "0.5000"]
    assert lines[4] == ["4", "40", "0.1", "1.25", "0.2500", "0.5000"]
    html = written()._repr_html_()
    assert html.count("<tr>") == 5
    assert '<td class="n">0.5000</td>' in html
    assert "without a row" in repr(new_history())
    assert "without a row" in new_history()._repr_html_()


def test_a_long_table_shows_its_end() -> None:
    history = History({"epoch": list(range(1, 201)), "train": {"loss": [0.5] * 200}})
    lines = repr(history).splitlines()
    assert len(lines) == 52
    assert lines[1].split() == ["151", "0.5000"]
    assert lines[-1] == "the last 50 of 200 rows"
    assert "<p>the last 50 of 200 rows</p>" in history._repr_html_()


def test_of_a_federated_training_it_is_over_rounds() -> None:
    history = History(
        {
            "round": [0, 1, 2],
            "cohort": [[1], [2], [3]],
            "train": {"loss": [3.0, 2.0, 1.0]},
            "valid": {"round": [0, 2], "loss": [4.0, 1.0]},
        }
    )
    assert history.measured()["valid loss"] == ([0, 2], [4.0, 1.0])
    assert list(history.columns()) == ["round", "train loss", "valid loss"]
    axes = history.plot().axes[0]
    assert axes.get_xlabel() == "round"
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 2, 3], [1, 3]]


@pytest.mark.parametrize("way", ["pickle", "copy", "worker", "file", "checkpoint"])
def test_it_travels_whole(way: str) -> None:
    history, file = written(), io.BytesIO()
    if way == "pickle":
        other = pickle.loads(pickle.dumps(history))
    elif way == "copy":
        other = copy.deepcopy(history)
    elif way == "worker":
        results.save([history], file)
        file.seek(0)
        (other,) = results.read(file)
    elif way == "file":
        importlib.import_module("allhands.loop.lifecycle")  # as a training does
        results.save([history], room := io.BytesIO())
        room.seek(0)
        results.read(room)  # as the end of workers does
        torch.save({"history": history}, file)
        file.seek(0)
        other = torch.load(file, weights_only=True)["history"]
    else:
        state = history.state_dict()
        results.save(state, file)
        assert type(state["history"]) is dict
        other = History.of_state(state)
    assert type(other) is History
    assert repr(other) == repr(history)
    other["train"]["loss"].append(9.0)
    assert len(history["train"]["loss"]) == 4


def test_the_curves_are_a_figure_that_shows_itself(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = written().plot(tmp_path / "curves.svg")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "loss"
    assert {line.get_label(): list(line.get_xdata()) for line in axes.lines} == {
        "train": [1, 2, 3, 4],
        "valid": [2, 4],
    }
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="train at least one epoch"):
        new_history().plot()
    several = History({"epoch": [1, 1], "step": [5, 10], "train": {"loss": [2.0, 1.0]}})
    assert several.plot().axes[0].get_xlabel() == "step"
