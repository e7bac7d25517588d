"""Pages that need no other file, in light and dark."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from allhands.report import page
from tests.browser import BACKGROUNDS, background, needs_browser, new_view, open_browser

pytest.importorskip("matplotlib")


def draw(figure: Any) -> None:
    axes = figure.subplots()
    axes.plot([1, 2, 3], [3, 2, 1], label="a")
    axes.legend()


def write(path: Path) -> str:
    drawn = [page.picture(draw, (4, 3), what) for what in ("one <b>", "other")]
    parts = [
        page.section("Curves", page.pictures(drawn)),
        page.section("Table", page.grid(["a", "b"], [["<x>", "1"]]) + page.pairs({"key": "<y>"})),
        page.section("Time", page.shares({"steps": 3.0, "rest": 1.0})),
    ]
    page.write_page(path, "A & B", "about", parts)
    return path.read_text()


def test_a_page_loads_nothing_and_escapes_what_it_is_given(tmp_path: Path) -> None:
    text = write(tmp_path / "report.html")
    assert not re.search(r"https?:|src=|<script|<link|@import|url\((?!#)", text)
    assert "<title>A &amp; B</title>" in text
    assert "<td>&lt;x&gt;</td>" in text
    assert "<td>&lt;y&gt;</td>" in text
    assert "75%" in text
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_pictures_take_the_colours_of_the_page_and_share_no_name(tmp_path: Path) -> None:
    text = write(tmp_path / "report.html")
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 2
    names = [set(re.findall(r'\bid="([^"]+)"', one)) for one in pictures]
    assert names[0]
    assert not names[0] & names[1]
    for one, known in zip(pictures, names, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', one)) <= known
        assert "#000000" not in one
        assert "currentColor" in one
        assert "prefers-color-scheme:dark" in text


def test_a_marked_section_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert not page.put_section(path, "", "verify")
    write(path)
    for number in (1, 2):
        assert page.put_section(path, page.section("Same?", f"run {number}", "verify"), "verify")
    text = path.read_text()
    assert text.count("Same?") == 1
    assert "run 2</body>" in re.sub(r"<!--.*?-->", "", text)
    assert text.count("<svg") == 2


@needs_browser
def test_a_browser_shows_it_without_moving_sideways(tmp_path: Path) -> None:
    write(tmp_path / "report.html")
    address = f"file://{tmp_path / 'report.html'}"
    seen: list[str] = []
    with open_browser() as browser:
        for width, scheme in itertools.product((1280, 400), ("light", "dark")):
            view = new_view(browser, width, scheme)
            view.on("request", lambda request: seen.append(request.url))
            view.goto(address)
            assert view.evaluate("document.documentElement.scrollWidth") == width
            assert background(view) == BACKGROUNDS[scheme]
            view.close()
    assert seen == [address] * 4
