"""The Flower app of a run file: what `flwr run` takes, for people who operate Flower already."""

from __future__ import annotations

import re
from pathlib import Path

from allhands.errors import UserError

#: The variable in which a generated app tells where its run file is.
RUN_FILE = "ALLHANDS_SITES_RUN"
PACKAGE = "allhands_training"

_PYPROJECT = """\
# Written by `allhands federated app`. Sites and server need allhands[flower] installed;
# nothing is installed at run time.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federated training that a run file of allhands describes"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "allhands"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

[tool.flwr.app.config]
"""
_MODULE = '''\
"""Written by `allhands federated app`: the {side} of the run file beside it."""

import os
from pathlib import Path

os.environ["{variable}"] = str(Path(__file__).with_name("run.yml"))
from allhands.federated.sites.{side}_app import app  # noqa: E402

__all__ = ["app"]
'''


def files(text: str, name: str = "allhands-training") -> dict[str, bytes]:
    """The files of the app, by their path in it.

    Args:
        text: the run file.
        name: the app's; letters, digits and hyphens, beginning with a letter.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name):
        raise UserError(
            f"{name!r} cannot name a Flower app; write up to 31 small letters, digits and hyphens"
        )
    made = {
        "pyproject.toml": _PYPROJECT.format(name=name, package=PACKAGE),
        f"{PACKAGE}/__init__.py": "",
        f"{PACKAGE}/run.yml": text,
    }
    for side in ("server", "client"):
        made[f"{PACKAGE}/{side}.py"] = _MODULE.format(side=side, variable=RUN_FILE)
    return {path: content.encode() for path, content in made.items()}


def write(folder: Path, text: str) -> None:
    """Write the app into an empty or new folder.

    Raises:
        UserError: there is something in the folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder} is not an empty folder; name a new one")
    for path, content in files(text).items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
