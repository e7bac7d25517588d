"""`import horovod` in the workers of `allhands launch --horovod` means allhands' names for it."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

# Set, it is provided in a job's agents and so in all that they start.
VARIABLE = "ALLHANDS_HOROVOD"
_FOLDER = str(Path(__file__).parents[1] / "horovod" / "alias")


def search_path(environ: MutableMapping[str, str]) -> str:
    """PYTHONPATH with the folder in front, so that every Python that a worker starts has the names
    too."""
    rest = [
        entry
        for entry in environ.get("PYTHONPATH", "").split(os.pathsep)
        if entry and entry != _FOLDER
    ]
    return os.pathsep.join([_FOLDER, *rest])


def provide() -> None:
    """Provide the names in this process and those that it starts, where the variable asks for
    it."""
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    os.environ["PYTHONPATH"] = search_path(os.environ)
    if _FOLDER not in sys.path:
        sys.path.insert(0, _FOLDER)
