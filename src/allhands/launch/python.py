"""The Python of an agent: what is installed in it, and which commands mean it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from typing import Any


def versions() -> dict[str, str]:
    """What must be equal on all hosts of a job."""
    found = {"Python": platform.python_version()}
    for name in ("torch", "allhands"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def same_version(name: str, version: str | None, other: str | None) -> bool:
    """Whether two hosts may work together. Patch releases of Python are alike; a build's suffix
    (2.13.0+cpu) matters."""
    if name == "Python" and version is not None and other is not None:
        return version.split(".")[:2] == other.split(".")[:2]
    return version == other


def as_python(task: dict[str, Any]) -> dict[str, Any]:
    """A program `python script.py …` or `python -m module …` as the script or module, where it is
    this Python.

    It then starts without importing torch once more, sends heartbeats, and its exceptions are told.
    """
    words = task.get("program", [])
    if len(words) > 1 and os.path.basename(words[0]).startswith("python"):
        found = shutil.which(words[0])
    else:
        found = None
    if found is None or not _is_this_python(found):
        return task
    rest = {name: value for name, value in task.items() if name != "program"}
    if words[1].endswith((".py", ".pyz")) and not words[1].startswith("-"):
        return {**rest, "script": words[1], "args": words[2:]}
    if words[1] == "-m" and len(words) > 2:
        return {**rest, "module": words[2], "args": words[3:]}
    return task


def _is_this_python(path: str) -> bool:
    # A virtual environment's Python is a link to the one that it was made from, so the folder
    # counts as well.
    same_folder = os.path.dirname(os.path.abspath(path)) == os.path.dirname(
        os.path.abspath(sys.executable)
    )
    return same_folder and os.path.realpath(path) == os.path.realpath(sys.executable)
