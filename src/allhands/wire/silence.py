"""Whether a process has been silent, or the one that listens to it was itself suspended."""

from __future__ import annotations

import time


class Suspension:
    """Notices that this process stood still: what it did not hear meanwhile is nobody's silence.

    Args:
        longest: seconds between two looks that a running process does not exceed.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._looked = time.monotonic()

    def ended(self, now: float) -> bool:
        """Whether this process has just gone on after it stood still; to be called regularly."""
        before, self._looked = self._looked, now
        return now - before > self._longest
