"""Curves of metrics as a PNG file, drawn by Pillow: at the end of a training the import of
matplotlib and its drawing take ten times as long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from allhands.report.figures import COMPRESSION, DPI, TEXT, font_file
from allhands.report.metric_plot import HEIGHT, WIDTH, Label, Line

_SCALE = DPI / 72  # pixels a point
_FINER = 4  # lines are drawn so many times as large, and made smaller for smooth edges
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}  # Pillow's, at the baseline
_WHITE = 0xFFFFFFFF  # as are all bytes of a pixel
_MASKS = (_WHITE, 0xF8F8F8F8, 0xF0F0F0F0, 0xE0E0E0E0, 0xC0C0C0C0)
_COLOURS = 256  # of a palette


def metrics_image(plots: Sequence[Iterable[Line | Label]], columns: int) -> Any:
    """Pictures of `metric_plot` in one ``PIL.Image.Image``, row by row.

    Args:
        plots: at least one.
        columns: pictures in a row.

    Raises:
        UserError: matplotlib, whose fonts are used, is not installed.
    """
    from PIL import Image

    width, height = round(WIDTH * _SCALE), round(HEIGHT * _SCALE)
    image = Image.new("RGBA", (width * columns, height * math.ceil(len(plots) / columns)), "white")
    for number, marks in enumerate(plots):
        cell = Image.new("RGBA", (width, height), "white")
        _draw(cell, marks)
        image.paste(cell, (number % columns * width, number // columns * height))
    return image


def save_png(image: Any, path: Path) -> None:
    """Write a white image with few colours as a PNG file with a palette, in less than half of the
    time and of the bytes that one without takes."""
    _with_palette(image).save(path, compress_level=COMPRESSION, dpi=(DPI, DPI))


def _with_palette(image: Any) -> Any:
    """The image with at most 256 colours. Where it has more, those that differ in their last bits
    become the most frequent one of them."""
    import numpy as np  # commands that draw nothing do without
    from PIL import Image

    pixels = np.frombuffer(image.tobytes(), np.uint32)
    drawn = np.flatnonzero(pixels != _WHITE)
    found, numbers, counts = np.unique(pixels[drawn], return_inverse=True, return_counts=True)
    for mask in _MASKS:
        kinds, kind_of = np.unique(found & np.uint32(mask), return_inverse=True)
        if len(kinds) < _COLOURS:
            break
    order = np.argsort(counts)
    colours = kinds.copy()
    colours[kind_of[order]] = found[order]  # the last of a kind stays
    places = np.zeros(len(pixels), np.uint8)
    places[drawn] = kind_of[numbers] + 1
    made = Image.frombytes("P", image.size, places.tobytes())
    channels = colours.view(np.uint8).reshape(-1, 4)[:, :3]
    made.putpalette(bytes(3 * [255]) + channels.tobytes())
    return made


@cache
def _font(bold: bool, size: float) -> Any:
    from PIL import ImageFont

    return ImageFont.truetype(font_file(bold), size * _SCALE)


def _draw(image: Any, marks: Iterable[Line | Label]) -> None:
    from PIL import ImageDraw

    pen = ImageDraw.Draw(image)
    for mark in marks:
        if isinstance(mark, Label):
            at = round(mark.x * _SCALE), round(mark.y * _SCALE)
            font = _font(mark.bold, mark.size)
            pen.text(at, mark.text, TEXT, font, _ANCHORS[mark.anchor])
        elif len({y for _, y in mark.points}) == 1 and not mark.dots:
            ends = [round(n * _SCALE) for point in mark.points for n in point]
            pen.line(ends, mark.colour, round(mark.width * _SCALE))
        else:
            _draw_curve(image, mark)


def _draw_curve(image: Any, line: Line) -> None:
    from PIL import Image, ImageDraw

    scale = _SCALE * _FINER
    room = math.ceil(max(line.width, line.dots) * _SCALE)
    left, above = (int(min(column) * _SCALE) - room for column in zip(*line.points, strict=True))
    right, below = (int(max(column) * _SCALE) + room for column in zip(*line.points, strict=True))
    points = [(x * scale - left * _FINER, y * scale - above * _FINER) for x, y in line.points]
    mask = Image.new("L", ((right - left) * _FINER, (below - above) * _FINER))
    pen = ImageDraw.Draw(mask)
    pen.line(points, 255, round(line.width * scale), joint="curve")
    ends = [points[0], points[-1]]
    for dots, diameter in ((ends, line.width), (points, line.dots)):
        for dot in dots if diameter else ():
            pen.circle(dot, diameter * scale / 2, 255)
    image.paste(line.colour, (left, above), mask.reduce(_FINER))
