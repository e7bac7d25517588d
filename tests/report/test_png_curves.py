"""Curves as a PNG file: what is drawn where, without matplotlib's import."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allhands.report import draw_curves, figures
from allhands.report.metric_plot import HEIGHT, WIDTH, Label, Line, metric_plot
from allhands.report.png_curves import metrics_image, save_png

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")


def _pixels(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def _places(pixels: Any, colour: tuple[int, int, int]) -> Any:
    """Rows and columns of the pixels of just this colour."""
    return np.argwhere((pixels == colour).all(axis=-1))


def test_a_curve_lies_where_its_values_are(tmp_path: Path) -> None:
    colour = (0x12, 0x34, 0x56)
    falling = metric_plot(
        "m", "epoch", {"t": ("#123456", (range(5), [4, 3, 2, 1, 0]))}, (-0.5, 4.5)
    )
    save_png(metrics_image([falling, falling], 1), tmp_path / "a.png")
    pixels = _pixels(tmp_path / "a.png")
    scale = figures.DPI / 72
    height, width = round(HEIGHT * scale), round(WIDTH * scale)
    assert pixels.shape == (2 * height, width, 3)
    assert (pixels[:height] == pixels[height:]).all()
    (curve,) = (mark for mark in falling if isinstance(mark, Line) and mark.dots)
    for x, y in curve.points:
        assert tuple(pixels[int(y * scale), int(x * scale)]) == colour
    ends = curve.points[0], curve.points[-1]
    left, right = ends[0][0] * scale, ends[1][0] * scale
    below = _places(pixels[int(height * 0.5) : height], colour)[:, 1]
    assert left < below.min() < below.max() < right + 5  # the second half of what falls


def test_texts_lie_at_their_anchors() -> None:
    places = {}
    for anchor in ("start", "middle", "end"):
        image = metrics_image([[Label("0.125", 150, 100, 10, anchor)]], 1)
        dark = np.argwhere(np.asarray(image)[:, :, 0] < 128)
        places[anchor] = dark[:, 1].min(), dark[:, 1].max()
        assert dark[:, 0].max() <= 100 * figures.DPI / 72 + 1  # on the baseline
    at = 150 * figures.DPI / 72
    assert at - 1 <= places["start"][0]
    assert places["middle"][0] < at < places["middle"][1]
    assert places["end"][1] <= at + 1


def test_many_colours_become_few_and_those_of_lines_stay(tmp_path: Path) -> None:
    colours = [f"#{40 * n:02x}50{255 - 40 * n:02x}" for n in range(6)]
    curves = {
        f"curve {n}": (colour, (range(9), [math.sin(n + i) for i in range(9)]))
        for n, colour in enumerate(colours)
    }
    image = metrics_image([metric_plot("m", "round", curves, (0, 8))], 1)
    exact = np.asarray(image)[:, :, :3].astype(int)
    assert len(np.unique(exact.reshape(-1, 3), axis=0)) > 256
    save_png(image, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as read:
        assert read.mode == "P"
    pixels = _pixels(tmp_path / "a.png")
    assert np.abs(pixels - exact).max() < 64
    for colour in (*colours, "#ffffff", figures.FAINT):
        wanted = tuple(bytes.fromhex(colour[1:]))
        assert len(_places(pixels, wanted)) >= len(_places(exact, wanted)) > 50


def test_it_takes_fonts_and_no_more_of_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    draw_curves(tmp_path / "a.png", {"epoch": [1]}, {"loss": {"train": ([0], [1.0])}})
    assert not any(name.split(".")[0] == "matplotlib" for name in sys.modules)


def test_where_fonts_lie_elsewhere_matplotlib_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = [figures.font_file(bold) for bold in (False, True)]
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    assert [figures.font_file(bold) for bold in (False, True)] == packed
