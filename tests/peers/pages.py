"""Writes docs/coala_api.md and docs/mxnet_api.md from folders with the peers' source."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.peers import coala_calls, coala_scripts, mxnet_calls, mxnet_scripts
from tests.peers.peer_page import page

DOCS = Path(__file__).parents[2] / "docs"
COALA, MXNET = DOCS / "coala_api.md", DOCS / "mxnet_api.md"
_STATES = """*Works*: it takes the peer's arguments and gives what the peer's does. *Differs*: it
takes them, and the difference is said. *Refused*: an error says what to write. *Absent*: it ends
without a word about it.
"""
_COALA = f"""# COALA's calls, one by one

Each public call of COALA, after `import allhands.federated as coala`; [From
COALA](migrate_coala.md) says more.

{_STATES}
Names of COALA's packages come from `allhands.federated`: `from allhands.federated import
BaseServer, slurm`. Its example scripts were run with only their import lines changed: one round, on
noise of the right shape. `make peers COALA=FOLDER` writes this page from a folder with COALA's
source{{}}.
"""
_MXNET = f"""# MXNet's store and trainer, one by one

Each public call of MXNet's key-value store and of Gluon's trainer, after `from allhands import
kvstore as kv`; [Parameter servers](kvstore.md#coming-from-mxnet) says more.

{_STATES}
MXNet's example scripts compute with its own arrays and do not run here; of those that have a store
or a trainer the table says which of their calls are here. `make peers MXNET=FOLDER` writes this
page from a folder with MXNet's source{{}}.
"""


def write_coala(folder: Path) -> Path:
    """Write the page of COALA's calls; returns its path."""
    version = _version(folder / "coala" / "version.py")
    scripts = coala_scripts.outcomes(folder)
    return _write(COALA, _COALA.format(version), coala_calls, folder, scripts)


def write_mxnet(folder: Path) -> Path:
    """Write the page of MXNet's calls; returns its path."""
    version = _version(folder / "python" / "mxnet" / "libinfo.py")
    scripts = mxnet_scripts.outcomes(folder)
    return _write(MXNET, _MXNET.format(version), mxnet_calls, folder, scripts)


def _write(
    path: Path, head: str, calls: ModuleType, folder: Path, scripts: dict[str, tuple[str, str]]
) -> Path:
    found = calls.found(folder)
    sections = {title: (calls.SECTIONS[title], found[title]) for title in found}
    path.write_text(page(head, sections, scripts))
    return path


def _version(file: Path) -> str:
    told = re.search(r"__version__ = ['\"]([^'\"]+)", file.read_text()) if file.exists() else None
    return f", version {told[1]}" if told else ""


WRITERS: dict[str, Callable[[Path], Path]] = {"COALA": write_coala, "MXNET": write_mxnet}
