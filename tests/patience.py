"""How long tests wait."""

from __future__ import annotations

import os
from pathlib import Path


def patience(seconds: float) -> float:
    """Seconds that something may take on this machine now, if it may take so many on one with
    nothing else to do.

    A bound says that nothing waits for ever. On a machine whose cores are shared, all takes longer.
    """
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return seconds * max(1.0, max(running, os.getloadavg()[0]) / len(os.sched_getaffinity(0)))
