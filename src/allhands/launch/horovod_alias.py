"""`import horovod` in the workers of `allhands launch --horovod` means allhands' names for it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

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


def is_on() -> bool:
    """Whether the job's workers have the name."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def variables(worker: Mapping[str, Any], cross_rank: int, cross_size: int) -> dict[str, str]:
    """What horovodrun sets for a worker, besides the host's name.

    Args:
        worker: the worker's own variables, as torchrun names them.
        cross_rank, cross_size: its host among those that have a worker with its local rank.
    """
    values = {
        "RANK": worker["RANK"],
        "SIZE": worker["WORLD_SIZE"],
        "LOCAL_RANK": worker["LOCAL_RANK"],
        "LOCAL_SIZE": worker["LOCAL_WORLD_SIZE"],
        "CROSS_RANK": cross_rank,
        "CROSS_SIZE": cross_size,
    }
    return {f"HOROVOD_{name}": str(value) for name, value in values.items()}


def set_variables(worker: Mapping[str, str]) -> None:
    """Set what `variables` gave, and the host's name, in the worker, where it has the name."""
    if worker and is_on():
        os.environ.update(worker, HOROVOD_HOSTNAME=socket.gethostname())


def provide() -> None:
    """Provide the names in this process and those that it starts, where the variable asks for
    it."""
    if not is_on():
        return
    os.environ["PYTHONPATH"] = search_path(os.environ)
    if _FOLDER not in sys.path:
        sys.path.insert(0, _FOLDER)
