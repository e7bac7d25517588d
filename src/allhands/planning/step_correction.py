"""From the time of an operation alone to its time in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from allhands.planning.step_recorder import UPDATE


@dataclass(frozen=True)
class StepCorrection:
    """What an operation takes in a step: ``factor * seconds + overhead`` in forward and backward
    passes, ``seconds + update_overhead`` in the update.

    Attributes:
        factor, overhead, update_overhead: see above.
        spread: the standard deviation of what takes a second; of other durations it grows by their
            square root.
    """

    factor: float = 1.0
    overhead: float = 0.0
    update_overhead: float = 0.0
    spread: float = 0.0

    def __call__(self, phase: str, seconds: float) -> float:
        if phase == UPDATE:
            return seconds + self.update_overhead
        return self.factor * seconds + self.overhead

    def later(self, seconds: float, ranks: int) -> float:
        """By how much the last of some ranks is expected behind the mean, where each has computed
        for so many seconds: the largest of normal numbers, after Blom."""
        if ranks < 2 or not self.spread:
            return 0.0
        largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
        return largest * self.spread * math.sqrt(seconds)


ALONE = StepCorrection()
