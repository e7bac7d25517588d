"""Flower's commands: where they are, which version they are, and an environment in which they keep
to themselves.

Flower is an extra: ``pip install 'allhands[flower]'``. This module can be imported without it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from allhands.atomic_write import atomic_write
from allhands.errors import UserError

#: The release whose commands, options and messages these modules were written for and tested with.
RELEASE = "1.42"
INSTALL = "pip install 'allhands[flower]', which brings flwr>=1.42,<1.43"
#: What Flower starts by name, looked for on PATH, when it is handed a task.
TASKS = (
    "flwr-serverapp",
    "flwr-clientapp",
    "flwr-simulation",
    "flwr-agentapp",
    "flwr-model",
    "flwr-connector",
)


def require() -> str:
    """Flower's version."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise UserError(
            f"federated training across sites needs Flower, which is not installed here: {INSTALL}"
        ) from None
    if found.split(".")[:2] != RELEASE.split("."):
        raise UserError(
            f"flwr {found} is installed, and its commands change from release to release: {INSTALL}"
        )
    return found


def command(name: str) -> str:
    """The path of one of Flower's commands, beside this Python before PATH.

    Raises:
        UserError: there is none.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    found = shutil.which(name, path=path)
    if found is None:
        raise UserError(f"there is no command {name} beside {sys.executable} or on PATH: {INSTALL}")
    return found


def write_commands(folder: Path, ours: Mapping[str, str]) -> Path:
    """Write the commands that Flower starts for a task, and return the folder to put first on PATH.

    Args:
        folder: the state folder; the commands go into its ``bin``.
        ours: by the name that Flower starts, the module that runs instead. Every other task of
            Flower's ends at once with a message, so that nothing that somebody else submits is ever
            run.
    """
    place = folder.absolute() / "bin"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in TASKS:
        if name in ours:
            # -P: a file that lies in the working folder cannot stand for a module.
            line = f'exec {shlex.quote(sys.executable)} -P -m {ours[name]} "$@"'
        else:
            line = f"echo {name}: allhands runs no such task >&2\nexit 1"
        with atomic_write(place / name) as aside:
            aside.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
            aside.chmod(0o700)
    return place


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of Flower's processes: no telemetry, no look for updates, no installing of
    packages, a home of their own in the state folder, and its ``bin`` first on PATH."""
    home = folder.absolute() / "flower"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    path = [
        str(folder.absolute() / "bin"),
        str(Path(sys.executable).parent),
        kept.get("PATH", os.defpath),
    ]
    return {
        **kept,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        # A server has one task, which waits when its superexec starts; a site's is told of tasks.
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1",
        # A SuperLink has several copies of the pieces (5 MB) of arrays that are on their way. glibc
        # would keep what they took, in a heap for each thread; what is larger than this is given
        # back at once.
        "MALLOC_MMAP_THRESHOLD_": kept.get("MALLOC_MMAP_THRESHOLD_", str(1 << 18)),
        "MALLOC_ARENA_MAX": kept.get("MALLOC_ARENA_MAX", "2"),
        # Flower's processes of one machine talk over loopback, which a proxy could not reach.
        **{
            name: ",".join(filter(None, (kept.get(name), "127.0.0.1,localhost")))
            for name in ("NO_PROXY", "no_proxy")
        },
        "PATH": os.pathsep.join(path),
        **more,
    }
