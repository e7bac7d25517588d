"""Files that appear whole or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A path beside `path`, with its ending, that takes its name when the block ends without an
    error. No other process has the same one: those of two hosts, or of two containers, may have
    the same number, and share the folder.

    Raises:
        OSError: the file cannot be renamed.
    """
    aside = path.with_name(f".{path.stem}.{secrets.token_hex(6)}.part{path.suffix}")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write text in UTF-8 that another process sees whole, or as it was before.

    Raises:
        OSError: the file cannot be written.
    """
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8")
