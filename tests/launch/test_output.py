"""Output goes to the console and to files, and its end is remembered."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from allhands.errors import UserError
from allhands.launch.output import KEPT_LINES, Output


def test_prefix_on_every_line(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    output = Output()
    output.write(3, 1, b"one\n\ntwo \xff\n")
    output.write(0, 2, b"problem\n")
    captured = capfdbinary.readouterr()
    assert captured.out == b"[3] one\n[3] \n[3] two \xff\n"
    assert captured.err == b"[0] problem\n"


def test_without_prefix_and_with_files(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = Output(prefix=False, log_dir=tmp_path / "deep" / "logs")
    output.write(1, 1, b"to stdout\n")
    output.write(1, 2, b"to stderr\n")
    output.close()
    assert (tmp_path / "deep/logs/rank-1.log").read_bytes() == b"to stdout\nto stderr\n"
    assert output.log_path(1) == tmp_path / "deep/logs/rank-1.log"
    assert capfdbinary.readouterr().out == b"to stdout\n"


def test_keeps_the_last_lines() -> None:
    output = Output(prefix=False)
    for index in range(100):
        output.write(0, 1, b"%d\nand\n" % index)
    assert output.tail(0) == [
        b"%d" % (90 + i // 2) if i % 2 == 0 else b"and" for i in range(KEPT_LINES)
    ]
    assert output.tail(5) == []


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"cannot write to the log folder '.*file/logs': Not a directory"
    ):
        Output(log_dir=tmp_path / "file" / "logs")


def test_a_notebook_has_a_stream_without_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    Output().write(0, 1, "é\n".encode() + b"\xff\n")
    assert stream.getvalue() == "[0] é\n[0] \ufffd\n"
