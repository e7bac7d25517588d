"""Every training with a logdir leaves its curves, drawn from the rows that it has written."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import SupervisedRunner, UserError
from allhands.loop import loggers
from allhands.report import curves, draw_curves

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is drawn."""
    found: list[Any] = []

    def draw(path: Path, at: Any, curves: Any) -> None:
        found.append((at, curves))
        draw_curves(path, at, curves)

    monkeypatch.setattr(loggers, "draw_curves", draw)
    monkeypatch.setenv("ALLHANDS_CURVES", "1")
    return found


def data() -> TensorDataset:
    return TensorDataset(torch.randn(8, 2), torch.randint(0, 2, (8,)))


def loop(logdir: Path, **options: Any) -> allhands.Loop:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = {name: DataLoader(data(), batch_size=2) for name in ("train", "valid")}
    return allhands.Loop(
        model=model, optimizer=optimizer, loaders=loaders, logdir=logdir, **options
    )


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def loss_of(own: allhands.Loop, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(own.model(batch[0]), batch[1])


def test_a_runners_epochs(drawn: list[Any], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={name: DataLoader(data(), batch_size=4) for name in ("train", "valid")},
        num_epochs=3,
        metrics=["accuracy"],
        logdir=tmp_path,
    )
    ((at, found),) = drawn
    assert at == {"epoch": [1, 2, 3]}
    assert {name: list(loaders) for name, loaders in found.items()} == {
        "loss": ["train", "valid"],
        "accuracy": ["train", "valid"],
    }
    assert is_picture(tmp_path / "curves.png")


def test_steps_with_an_evaluation_now_and_then(drawn: list[Any], tmp_path: Path) -> None:
    own = loop(tmp_path)
    for step in own.steps(8):
        own.step(lambda batch: loss_of(own, batch), step.batch)
        if step.every(2):
            step.log(**step.train())
        if step.every(4):
            step.evaluate("valid", lambda batch: loss_of(own, batch))
    ((at, found),) = drawn
    assert at == {"step": [2, 4, 6, 8]}
    assert found["loss"]["train"][0] == [0, 1, 2, 3]
    assert found["loss"]["valid"][0] == [1, 3]
    assert is_picture(tmp_path / "curves.png")


def test_an_error_or_the_variable_leaves_them_out(
    drawn: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = loop(tmp_path)
    with pytest.raises(ZeroDivisionError):
        for epoch in own.epochs(2):
            for batch in epoch.train:
                own.step(lambda batch: loss_of(own, batch), batch)
            if epoch.number == 2:
                raise ZeroDivisionError
    monkeypatch.setenv("ALLHANDS_CURVES", "0")
    own = loop(tmp_path)
    for epoch in own.epochs(1):
        for batch in epoch.train:
            own.step(lambda batch: loss_of(own, batch), batch)
    assert drawn == []


def test_many_metrics_and_loaders_have_a_place_each(tmp_path: Path) -> None:
    rows = [0, 1]
    found = {f"metric {number}": {"train": (rows, [1.0, 2.0])} for number in range(11)}
    found["metric 0"] |= {name: (rows, [0.0, float("nan")]) for name in ("valid", "a", "b")}
    draw_curves(tmp_path / "many.svg", {"round": [1, 2]}, found)
    text = (tmp_path / "many.svg").read_text()
    assert "<svg" in text
    assert len({curves._colour(name, ["train", "valid", "a", "b"]) for name in "ab"}) == 2
    with pytest.raises(UserError, match="cannot be written"):
        draw_curves(tmp_path / "absent" / "a.png", {"round": [1, 2]}, found)
    for name in ("none.svg", "none.png"):
        with pytest.raises(UserError, match=rf"{name} is not drawn: there is no curve"):
            draw_curves(tmp_path / name, {"round": [1, 2]}, {})


def test_all_that_is_written_lies_within_the_picture_and_apart() -> None:
    scales = {"loss": 1.0, "millions": 5e6, "tiny": 2e-6, "long": 0.0123}
    found = {
        name: {"train": ([0, 1], [scale, scale / 3]), "valid": ([0, 1], [scale, scale / 2])}
        for name, scale in scales.items()
    }
    figure = curves.curves_figure({"epoch": [1, 100_000]}, found)
    figure.draw_without_rendering()
    drawn, empty = figure.axes[: len(scales)], figure.axes[len(scales) :]
    assert empty
    assert not any(axes.axison for axes in empty)
    boxes = [axes.get_tightbbox() for axes in drawn]
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    (tiny,) = (axes for axes in drawn if axes.get_title(loc="left") == "tiny")
    common = tiny.yaxis.get_offset_text()
    assert common.get_text()
    assert not common.get_window_extent().overlaps(tiny._left_title.get_window_extent())


def test_a_long_curve_keeps_its_peaks_and_its_ends() -> None:
    values = [float(n % 7) for n in range(20_000)]
    values[12_345], values[777] = 99.0, math.nan
    rows, kept = curves.thinned(list(range(20_000)), values)
    assert len(kept) <= 602
    assert (rows[0], rows[-1]) == (0, 19_999)
    assert kept[rows.index(12_345)] == 99.0
    assert min(kept) == 0.0
    assert curves.thinned([0, 5], [1.0, 2.0]) == ([0, 5], [1.0, 2.0])
