"""How one worker's gradients enter a step, and what is known of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from allhands.errors import UserError


@dataclass(frozen=True)
class Share:
    """How one worker's gradients enter a step.

    Attributes:
        weight: how many samples they stand for.
        expected: the sum of the gradients is multiplied by expected / (the sum of the weights of
            those who pushed). With 1, gradients that are sums over samples become the mean over all
            samples. With the size of the global batch, gradients that are parts of one mean already
            stay as they are, unless a worker is missing. None leaves the plain sum.
    """

    weight: float = 1.0
    expected: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise UserError(f"weight={self.weight}; it must be a number of samples, 0 or more")


@dataclass(frozen=True)
class Step:
    """What is known of a step that the store has taken.

    Attributes:
        number: steps taken so far, this one included.
        workers: how many workers' gradients are in it.
        staleness: how many pushes of others were applied between this worker's last pull and its
            push; the largest over all chunks and servers; always 0 in sync. Of tables of rows it is
            not counted.
    """

    number: int
    workers: int
    staleness: int = 0
