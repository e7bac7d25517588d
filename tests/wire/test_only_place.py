"""One module binds ports."""

from __future__ import annotations

import re
from pathlib import Path

import allhands

LISTENS = re.compile(
    r"\.listen\(|create_server\(|start_server\(|\.bind\(\s*[(\"']|HTTPServer\(|SocketServer|\bTCPServer\b"
)


def test_nothing_but_the_wire_binds_or_listens() -> None:
    root = Path(allhands.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        text = re.sub(r"\bwire\.listen\(", "", path.read_text(encoding="utf-8"))
        if LISTENS.search(text):
            found.add(path.relative_to(root).as_posix())
    assert found == {"wire/listeners.py"}
