"""From the time of an operation alone to its time in a step."""

from __future__ import annotations

from dataclasses import dataclass

from allhands.planning.step_recorder import UPDATE


@dataclass(frozen=True)
class StepCorrection:
    """What an operation takes in a step: ``factor * seconds + overhead`` in forward and backward
    passes, ``seconds + update_overhead`` in the update."""

    factor: float = 1.0
    overhead: float = 0.0
    update_overhead: float = 0.0

    def __call__(self, phase: str, seconds: float) -> float:
        if phase == UPDATE:
            return seconds + self.update_overhead
        return self.factor * seconds + self.overhead


ALONE = StepCorrection()
