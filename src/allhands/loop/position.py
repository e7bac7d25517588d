"""How far the training has come within an epoch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Position:
    """How far it is.

    Attributes:
        done: the loaders that were trained on in this epoch already, with their metrics.
        samples: samples of all ranks that the current loader's steps have taken, of the epoch's
            global order.
        steps: optimizer steps taken with the current loader.
        evaluating: all training loaders are done, and buffers were made equal.
        evaluating_between: the evaluation between two steps has begun.
        rates: learning rates at the start of the epoch.
        seconds: time spent in this epoch before it was interrupted.
    """

    done: dict[str, dict[str, float]] = field(default_factory=dict)
    samples: int = 0
    steps: int = 0
    evaluating: bool = False
    evaluating_between: bool = False
    rates: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_resumed(self) -> bool:
        """Whether the epoch was begun before the process was."""
        return bool(self.samples or self.done or self.evaluating or self.seconds)

    def finish(self, loader: str, metrics: dict[str, float]) -> None:
        """The current loader is through."""
        self.done[loader] = metrics
        self.samples = self.steps = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
