"""Curves of a page: what is drawn where."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

from allhands.report.metric_plot import metric_plot
from allhands.report.svg_curves import metric_svg

_NAN = math.nan


def _svg(name: str, label: str, *given: Any) -> str:
    return metric_svg(metric_plot(name, label, *given), f"{name} over {label}")


def _drawn(text: str, colour: str) -> list[str]:
    """The paths of a colour."""
    found = ElementTree.fromstring(text).iter("path")
    return [one.attrib["d"] for one in found if one.attrib["stroke"] == colour]


def _points(path: str) -> list[tuple[float, ...]]:
    return [tuple(map(float, point.split())) for point in re.split("[ML]", path) if point]


def test_a_curve_goes_through_its_values_with_a_gap_where_there_is_none():
    values = [1.0, 0.5, _NAN, 0.25, 0.0]
    text = _svg("a < b", "epoch", {"x&y": ("#123456", (range(5), values))}, (-0.5, 4.5))
    first, dots, second, *rest = _drawn(text, "#123456")
    points = _points(first + second)
    assert len(points) == 4
    across, down = zip(*points, strict=True)
    assert list(across) == sorted(across)
    assert list(down) == sorted(down)  # falling values lie lower and lower
    assert dots.count("h0") == 2
    (x, y), (end, level) = _points(rest[-1])  # beside the name
    assert (end - x, level - y) == (18, 0)
    assert "a &lt; b over epoch" in text
    assert "x&amp;y" in text


def test_a_long_curve_has_no_dots_and_its_name_lies_where_it_covers_nothing():
    places = list(range(100))
    for values, right in (([-p for p in places], True), (places, False)):
        text = _svg("m", "step", {"train": ("#1", (places, values))}, (0.0, 99.0))
        line, name = _drawn(text, "#1")
        assert line.count("L") == 99
        x, y = _points(name)[0]
        assert (x > 165) is right
        assert y < 115  # the curves' own corners are above at one end, and below at the other


def test_a_metric_without_a_number_has_its_axes_and_its_name():
    text = _svg("loss", "round", {"train": ("#1", ([1.0], [_NAN]))}, (0.5, 1.5))
    texts = [one.text for one in ElementTree.fromstring(text).iter("text")]
    assert {"loss", "round", "train", "1", "0.0", "1.0"} <= set(texts)
