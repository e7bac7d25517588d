"""Curves of one metric as SVG in the colours of a page."""

from __future__ import annotations

import html
from collections.abc import Iterable

from allhands.report.figures import FAINT
from allhands.report.metric_plot import HEIGHT, WIDTH, Label, Line


def metric_svg(marks: Iterable[Line | Label], what: str) -> str:
    """A picture of `metric_plot` as a part of a page.

    Args:
        marks: of the picture.
        what: says what is seen, for those who do not see it.
    """
    body = "".join(_line(mark) if isinstance(mark, Line) else _text(mark) for mark in marks)
    size = f"0 0 {WIDTH} {HEIGHT}"
    label = html.escape(what, quote=True)
    return f'<svg role="img" aria-label="{label}" viewBox="{size}">{body}</svg>'


def _line(line: Line) -> str:
    colour = "var(--faint)" if line.colour == FAINT else line.colour
    path = "L".join(f"{x:g} {y:g}" for x, y in line.points)
    drawn = (
        f"<path d='M{path}' fill='none' stroke='{colour}' stroke-width='{line.width:g}' "
        "stroke-linejoin='round'/>"
    )
    if not line.dots:
        return drawn
    # A line of no length with a round end is a dot.
    dots = "".join(f"M{x:g} {y:g}h0" for x, y in line.points)
    return (
        f"{drawn}<path d='{dots}' stroke='{colour}' stroke-width='{line.dots:g}' "
        "stroke-linecap='round'/>"
    )


def _text(label: Label) -> str:
    anchor = "" if label.anchor == "start" else f" text-anchor='{label.anchor}'"
    weight = " font-weight='bold'" if label.bold else ""
    where = f"x='{label.x:g}' y='{label.y:g}' font-size='{label.size:g}'"
    return f"<text {where}{anchor}{weight}>{html.escape(label.text)}</text>"
