"""Lines are cut whole, whatever the pieces in which they arrive."""

from __future__ import annotations

import random

import pytest

from allhands.launch import lines
from allhands.launch.lines import LineCutter


def test_any_pieces_give_the_same_lines() -> None:
    text = (
        bytes(random.Random(0).randrange(256) for _ in range(20_000)).replace(b"\r", b"") + b"\nend"
    )
    rng = random.Random(1)
    cutter, got, at = LineCutter(), b"", 0
    while at < len(text):
        step = rng.randrange(1, 300)
        piece = cutter.feed(text[at : at + step])
        assert not piece or piece.endswith(b"\n")
        got += piece
        at += step
    assert got + cutter.flush() == text + b"\n"


def test_nothing_to_flush() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"whole\n") == b"whole\n"
    assert cutter.flush() == b""


def test_windows_line_ends() -> None:
    assert LineCutter().feed(b"one\r\ntwo\r\n") == b"one\ntwo\n"


def test_progress_bar_shows_its_last_state() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"\r 10%") == b""
    assert cutter.feed(b"\r 50%") == b""
    assert cutter.feed(b"\r100%\nnext\n") == b"100%\nnext\n"


def test_progress_bar_is_shown_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PROGRESS_EVERY", 0.0)
    cutter = LineCutter()
    assert cutter.feed(b"\r 10%") == b" 10%\n"
    assert cutter.feed(b"\r 20%") == b" 20%\n"


def test_endless_progress_bar_is_not_kept() -> None:
    cutter = LineCutter()
    for step in range(10_000):
        cutter.feed(b"\rstep %d of many" % step)
    assert len(cutter._rest) < 100


def test_overlong_line_is_passed_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST", 10)
    assert LineCutter().feed(b"x" * 11) == b"x" * 11 + b"\n"
