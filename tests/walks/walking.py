"""Runs a walk: a script that does what a new user would type, in an empty folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.examples.running import EXAMPLES, run_in

WALKS = Path(__file__).parent


def environment(**more: str) -> dict[str, str]:
    """With the commands beside this Python first, and `python` among them."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "OMP_NUM_THREADS": "1", **more}


def walk(name: str, folder: Path, *words: str, **more: str) -> str:
    """What the script of that name printed; fails with it unless the exit code is 0."""
    return run_in(folder, "sh", str(WALKS / f"{name}.sh"), *words, env=environment(**more))


def in_order(text: str, *parts: str) -> None:
    """Fail unless `text` has all of these, each behind the one before."""
    at = 0
    for part in parts:
        found = text.find(part, at)
        assert found >= 0, f"{part!r} is missing, or comes too early, in:\n{text}"
        at = found + len(part)


__all__ = ["EXAMPLES", "environment", "in_order", "walk"]
