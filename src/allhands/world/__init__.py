"""Who am I among the processes: detection, `init`, `finalize`.

Importing this module imports no torch; `init` does.
"""

from __future__ import annotations

from allhands.world.detection import detect
from allhands.world.group import World, current_world, finalize, init
from allhands.world.hostlist import expand_hosts
from allhands.world.layout import Layout
from allhands.world.request import DEFAULT_TIMEOUT

__all__ = [
    "DEFAULT_TIMEOUT",
    "Layout",
    "World",
    "current_world",
    "detect",
    "expand_hosts",
    "finalize",
    "init",
]
