"""Curves of a page: numbers of their axes, and what is drawn where."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from allhands.report.svg_curves import metric_svg, tick_labels, ticks, value_bounds

_NAN = math.nan


@pytest.mark.parametrize(
    ("low", "high", "most", "whole", "found"),
    [
        (0.0, 1.0, 7, False, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.3, 0.31, 7, False, [-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3]),
        (0.5, 8.5, 6, True, [2, 4, 6, 8]),
        (0.5, 3.5, 6, True, [1, 2, 3]),
        (0.0, 14.0, 6, True, [0, 5, 10]),  # and not by 2.5
        (0.0, 1e6, 6, True, [0, 2e5, 4e5, 6e5, 8e5, 1e6]),
        (2.1e-6, 2.9e-6, 7, False, [2.2e-6, 2.4e-6, 2.6e-6, 2.8e-6]),
    ],
)
def test_ticks_are_round_evenly_spaced_and_within(low, high, most, whole, found):
    assert ticks(low, high, most, whole) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize(
    ("values", "texts", "common"),
    [
        ([0.0, 0.5, 1.0], ["0.0", "0.5", "1.0"], ""),
        ([-0.25, 0.0, 0.25], ["\N{MINUS SIGN}0.25", "0.00", "0.25"], ""),
        ([2e-6, 4e-6], ["2", "4"], "1e-6"),
        ([5.000e6, 5.002e6], ["5.000", "5.002"], "1e6"),
        ([0.98765, 0.9876502], ["0", "2"], "1e-7 +0.98765"),
        ([7.0], ["7"], ""),
    ],
)
def test_numbers_beside_an_axis_are_short_and_tell_the_values(values, texts, common):
    assert tick_labels(values) == (texts, common)


def test_an_axis_of_values_begins_at_zero_where_that_hides_nothing():
    assert value_bounds([0.1, 1.0]) == (0.0, pytest.approx(1.045))
    assert value_bounds([0.9, 1.0]) == pytest.approx((0.895, 1.005))
    assert value_bounds([-1.0, 5.0]) == pytest.approx((-1.3, 5.3))
    assert value_bounds([2.0, 2.0]) == pytest.approx((1.9, 2.1))
    assert value_bounds([0.0])[0] < 0 < value_bounds([0.0])[1]
    assert value_bounds([]) == (0.0, 1.0)


def _drawn(text: str, colour: str) -> list[str]:
    """The paths of a colour."""
    found = ElementTree.fromstring(text).iter("path")
    return [one.attrib["d"] for one in found if one.attrib["stroke"] == colour]


def test_a_curve_goes_through_its_values_with_a_gap_where_there_is_none():
    values = [1.0, 0.5, _NAN, 0.25, 0.0]
    text = metric_svg("a < b", "epoch", {"x&y": ("#123456", (range(5), values))}, (-0.5, 4.5))
    first, dots, second, *rest = _drawn(text, "#123456")
    points = [
        tuple(map(float, point.split())) for point in re.split("[ML]", first + second) if point
    ]
    assert len(points) == 4
    across, down = zip(*points, strict=True)
    assert list(across) == sorted(across)
    assert list(down) == sorted(down)  # falling values lie lower and lower
    assert dots.count("h0") == 2
    assert rest[-1].endswith("h18")  # beside the name
    assert "a &lt; b over epoch" in text
    assert "x&amp;y" in text


def test_a_long_curve_has_no_dots_and_its_name_lies_where_it_covers_nothing():
    places = list(range(100))
    for values, right in (([-p for p in places], True), (places, False)):
        text = metric_svg("m", "step", {"train": ("#1", (places, values))}, (0.0, 99.0))
        line, name = _drawn(text, "#1")
        assert line.count("L") == 99
        x, y = map(float, name[1 : name.index("h")].split())
        assert (x > 165) is right
        assert y < 115  # the curves' own corners are above at one end, and below at the other


def test_a_metric_without_a_number_has_its_axes_and_its_name():
    text = metric_svg("loss", "round", {"train": ("#1", ([1.0], [_NAN]))}, (0.5, 1.5))
    texts = [one.text for one in ElementTree.fromstring(text).iter("text")]
    assert {"loss", "round", "train", "1", "0.0", "1.0"} <= set(texts)
