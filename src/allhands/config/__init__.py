"""Run files: a training as typed keys and values, checked before anything is built.

Importing this module imports no torch; the objects that a run names are made by ``allhands run``.
"""

from __future__ import annotations

from allhands.config.reading import RunFile, nearest, parse_override, read_run
from allhands.config.schema import RunConfig

__all__ = ["RunConfig", "RunFile", "nearest", "parse_override", "read_run"]
