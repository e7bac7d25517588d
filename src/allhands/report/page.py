"""Pages of HTML that need no other file and no network, in light and dark."""

from __future__ import annotations

import html
import io
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allhands.atomic_write import atomic_write_text
from allhands.report.figures import FAINT, TEXT, new_figure, require_matplotlib

#: The name of the page in a logdir.
NAME = "report.html"
_STYLE = """
:root{color-scheme:light dark;--text:#24272c;--faint:#d8dade;--back:#fff;--soft:#5f6673}
@media(prefers-color-scheme:dark){:root{--text:#e6e8ec;--faint:#3d424b;--back:#15171b;--soft:#a0a7b4}}
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:0 auto;padding:1.2em 1em 3em;
color:var(--text);background:var(--back)}
h1{font-size:1.5em;margin:.3em 0}h2{font-size:1.15em;margin:2em 0 .6em;border-bottom:1px solid
var(--faint);padding-bottom:.2em}p,summary{color:var(--soft)}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr));gap:1em}
svg{width:100%;height:auto}svg text{fill:currentColor}
.wide{overflow-x:auto}.readable{min-width:640px}table{border-collapse:collapse}
td,th{padding:2px 16px 2px 0;text-align:left;vertical-align:top;overflow-wrap:anywhere}
th{color:var(--soft);font-weight:normal}td.n,th.n{text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums}pre{overflow-x:auto;font-size:13px}
.wide td,.wide th{overflow-wrap:normal}.pictures+.wide,.wide+.pictures{margin-top:1em}
.bar{display:inline-block;height:.7em;background:#2e6f95;border-radius:2px}
.pairs td:first-child{overflow-wrap:normal;min-width:7em}
@media(max-width:500px){body{font-size:14px}}
"""
_COLOURS = {TEXT: "currentColor", "#000000": "currentColor", FAINT: "var(--faint)"}
_OF_OTHERS = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->", re.DOTALL)


def write_page(path: str | Path, title: str, about: str, sections: Iterable[str]) -> None:
    """Write a page, whole or not at all."""
    atomic_write_text(Path(path), document(title, about, sections))


def document(title: str, about: str, sections: Iterable[str], head: str = "") -> str:
    """The text of a page; `head` is put into its head, and for the rest see `write_page`."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title>{head}<style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1>{paragraph(about)}"
        f"{''.join(sections)}</body></html>\n"
    )


def paragraph(text: str) -> str:
    """A line of plain text."""
    return f"<p>{html.escape(text)}</p>"


def section(title: str, body: str, mark: str = "") -> str:
    """A part of a page; with a mark, `put_section` finds it again."""
    text = f"<h2>{html.escape(title)}</h2>{body}"
    return f"<!-- {mark} -->{text}<!-- /{mark} -->" if mark else text


def put_section(path: Path, part: str, mark: str) -> bool:
    """Put a marked section into a page, in the place of an earlier one or at the end; False where
    there is no page."""
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    rest = _OF_OTHERS.sub(lambda found: "" if found[1] == mark else found[0], text)
    atomic_write_text(path, rest.replace("</body>", f"{part}</body>"))
    return True


def pairs(rows: Mapping[str, Any]) -> str:
    """A table of names and values."""
    cells = (
        f"<tr><td>{html.escape(str(key))}</td><td>{html.escape(str(value))}</td></tr>"
        for key, value in rows.items()
    )
    return f'<table class="pairs">{"".join(cells)}</table>'


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; all columns after the first `left` are numbers."""
    kinds = ["" if number < left else ' class="n"' for number in range(len(header))]

    def line(tag: str, cells: Sequence[str]) -> str:
        found = zip(cells, kinds, strict=True)
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in found)

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{line("th", header)}</tr>{body}</table></div>'


def shares(parts: Mapping[str, float]) -> str:
    """Seconds by what they were spent on, with bars."""
    whole = sum(parts.values()) or 1.0
    rows = (
        f'<tr><td>{html.escape(name)}</td><td class="n">{seconds:,.2f} s</td>'
        f'<td class="n">{seconds / whole:.0%}</td>'
        f'<td><span class="bar" style="width:{90 * seconds / whole:.1f}px"></span></td></tr>'
        for name, seconds in parts.items()
    )
    return f"<table>{''.join(rows)}</table>"


def as_written(text: str) -> str:
    """A text as a terminal shows it."""
    return f"<pre>{html.escape(text)}</pre>"


def folded(title: str, text: str) -> str:
    """A text that is shown when it is asked for."""
    return f"<details><summary>{html.escape(title)}</summary>{as_written(text)}</details>"


def pictures(drawn: Iterable[str]) -> str:
    """Pictures beside one another where there is room."""
    return f'<div class="pictures">{"".join(drawn)}</div>'


def wide(picture: str) -> str:
    """A picture that is moved sideways on a narrow screen, and not made too small to read."""
    return f'<div class="wide"><div class="readable">{picture}</div></div>'


def picture(draw: Callable[[Any], None], size: tuple[float, float], what: str) -> str:
    """A figure as a part of a page, in its colours.

    Args:
        draw: takes the figure.
        size: in inches.
        what: says what is seen, for those who do not see it.

    Raises:
        UserError: matplotlib is not installed.
    """
    require_matplotlib("a report")
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    room = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": what}):
        figure = new_figure(*size, what="a report")
        draw(figure)
        for part in (figure, *figure.axes):
            part.patch.set_visible(False)
        # savefig draws twice
        FigureCanvasSVG(figure).print_svg(room, metadata={"Date": None})
    text = room.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text.replace("xlink:href", "href"))
    # Names in one picture must not be those of another.
    own = f"p{zlib.crc32(what.encode()):08x}-"
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{own}", text)
    for colour, name in _COLOURS.items():
        text = text.replace(colour, name)
    text = re.sub(r"\n\s*", "\n", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(what)}"', 1)
