"""Where curves of one metric, its axes and its texts lie in a picture, whatever draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from allhands.report.figures import FAINT

WIDTH, HEIGHT = 331.2, 230.4  # points, as of a figure of 4.6 x 3.2 inches
_LEFT, _RIGHT, _BELOW, _ABOVE = 52.0, 18.0, 40.0, 34.0  # around the curves
_MARGIN = 0.05  # of the values' range, above and below them
_LETTER = 5.4  # the width of one at the size of the legend
_LINE = 14.0  # from one name in the legend to the next
_LONGEST = 7  # letters of a number beside the axis
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)

_At = Callable[[float, float], tuple[float, float]]
Points = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Line:
    """A line through points, which may have a dot at each.

    Args:
        points: in points of 1/72 inch from the left and from above.
        colour: ``"#rrggbb"``.
        width: in the same unit, as is that of dots.
        dots: the diameter of dots; 0: none.
    """

    points: Sequence[tuple[float, float]]
    colour: str
    width: float
    dots: float = 0.0


@dataclass(frozen=True)
class Label:
    """A text in one line.

    Args:
        text: plain.
        x: of its start, middle or end, as `anchor` says.
        y: of its baseline.
        size: of its letters, in points.
        anchor: "start", "middle" or "end".
        bold: it is.
    """

    text: str
    x: float
    y: float
    size: float
    anchor: str = "start"
    bold: bool = False


def metric_plot(
    name: str,
    label: str,
    curves: Mapping[str, tuple[str, Points]],
    bounds: tuple[float, float],
    whole: bool = True,
    dots: int = 60,
) -> list[Line | Label]:
    """What a picture of `WIDTH` x `HEIGHT` points shows, the lowest first.

    Args:
        name: of the metric, above.
        label: below.
        curves: by name: a colour, the places and the values, as many of each. Values that are not
            finite leave a gap.
        bounds: the least and the greatest place that is shown.
        whole: places are whole numbers.
        dots: a curve of so many values at most has a dot at each.
    """
    finite = [v for _, (_, values) in curves.values() for v in values if math.isfinite(v)]
    low, high = value_bounds(finite)
    across = (WIDTH - _LEFT - _RIGHT) / (bounds[1] - bounds[0])
    up = (HEIGHT - _BELOW - _ABOVE) / (high - low)

    def at(place: float, value: float) -> tuple[float, float]:
        return (
            round(_LEFT + (place - bounds[0]) * across, 1),
            round(HEIGHT - _BELOW - (value - low) * up, 1),
        )

    lines: list[Line] = []
    for colour, (places, values) in curves.values():
        parts: list[list[tuple[float, float]]] = [[]]
        for place, value in zip(places, values, strict=True):
            if math.isfinite(value):
                parts[-1].append(at(place, value))
            else:
                parts.append([])
        diameter = 4.0 if len(values) <= dots else 0.0
        lines += [Line(part, colour, 2.0, diameter) for part in parts if part]
    drawn = [point for line in lines for point in line.points]
    return [
        *_value_axis(low, high, at),
        *_place_axis(bounds, whole, at),
        Label(name, _LEFT, _ABOVE - 15, 12, bold=True),
        Label(label, (_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, 10, "middle"),
        *lines,
        *_legend({key: colour for key, (colour, _) in curves.items()}, drawn),
    ]


def value_bounds(values: Sequence[float]) -> tuple[float, float]:
    """What is shown of an axis of these finite values; it begins at 0 where nothing is below it and
    that hides no difference."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    room = _MARGIN * (high - low) or _MARGIN * abs(high) or _MARGIN
    if low >= 0 and high > 3 * low:
        return 0.0, high + room
    return low - room, high + room


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers between two others, evenly spaced, at most `most` + 1."""
    least = (high - low) / most
    size = 10.0 ** math.floor(math.log10(least))
    if whole:
        size = max(size, 1.0)
    steps = [factor * size for factor in _STEPS if not whole or (factor * size).is_integer()]
    step = next((one for one in steps if one >= least * (1 - 1e-9)), 10 * size)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> tuple[list[str], str]:
    """The numbers beside an axis, and what they have in common, written above it: a power of ten,
    or what is added to each."""
    if len(values) < 2:
        return [f"{value:.4g}" for value in values], ""
    step, largest = values[1] - values[0], max(map(abs, values))
    power = math.floor(math.log10(largest))
    common = ""
    if not -4 < power < 5:
        values, step, common = [v / 10.0**power for v in values], step / 10.0**power, f"1e{power}"
    places = next(
        (n for n in range(16) if all(abs(round(v, n) - v) < 1e-6 * step for v in values)), 16
    )
    texts = [f"{value + 0.0:.{places}f}" for value in values]
    if max(map(len, texts)) > _LONGEST and largest > 10 * (values[-1] - values[0]):
        unit = 10.0 ** math.ceil(math.log10(values[-1] - values[0]))
        base = math.floor(values[0] / unit) * unit
        texts, inner = tick_labels([value - base for value in values])
        return texts, " ".join(filter(None, (inner, f"+{base:.10g}", common)))
    return [text.replace("-", "\N{MINUS SIGN}") for text in texts], common


def _value_axis(low: float, high: float, at: _At) -> list[Line | Label]:
    values = ticks(low, high, 7)
    texts, common = tick_labels(values)
    made: list[Line | Label] = []
    for value, text in zip(values, texts, strict=True):
        _, y = at(0.0, value)
        made.append(Line([(_LEFT, y), (WIDTH - _RIGHT, y)], FAINT, 0.8))
        made.append(Label(text, _LEFT - 5, y + 3.5, 10, "end"))
    return [*made, Label(common, _LEFT, _ABOVE - 3, 9)] if common else made


def _place_axis(bounds: tuple[float, float], whole: bool, at: _At) -> list[Line | Label]:
    values, bottom = ticks(*bounds, 6, whole), HEIGHT - _BELOW
    texts, common = tick_labels(values) if not whole else ([f"{v:.0f}" for v in values], "")
    made: list[Line | Label] = [Line([(_LEFT, bottom), (WIDTH - _RIGHT, bottom)], FAINT, 1.0)]
    for value, text in zip(values, texts, strict=True):
        x, _ = at(value, 0.0)
        made.append(Label(text, x, bottom + 13, 10, "middle"))
    if common:
        made.append(Label(common, WIDTH - _RIGHT, HEIGHT - 8, 9, "end"))
    return made


def _legend(names: Mapping[str, str], drawn: Sequence[tuple[float, float]]) -> list[Line | Label]:
    """The curves' names, in the corner where they cover the least."""
    width = 26 + _LETTER * max(map(len, names), default=0)
    height = _LINE * len(names)
    corners = [
        (x, y)
        for y in (_ABOVE + 4, HEIGHT - _BELOW - height - 4)
        for x in (WIDTH - _RIGHT - width, _LEFT + 6)
    ]

    def covered(corner: tuple[float, float]) -> int:
        x, y = corner
        return sum(x - 3 <= a <= x + width and y - 3 <= b <= y + height + 3 for a, b in drawn)

    x, y = min(corners, key=covered)
    made: list[Line | Label] = []
    for row, (name, colour) in enumerate(names.items()):
        middle = y + _LINE * (row + 0.5)
        made.append(Line([(x, middle), (x + 18, middle)], colour, 2.0))
        made.append(Label(name, x + 24, middle + 3, 9))
    return made
