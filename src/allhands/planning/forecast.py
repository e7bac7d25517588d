"""What one way of training would take."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from allhands.planning.server_load import ServerLoad
from allhands.planning.timing import StepTime


@dataclass(frozen=True)
class Prediction:
    """What one way of training would take.

    Attributes:
        name: the strategy, in words.
        lines: what a run file says of it.
        memory: bytes of the fullest rank by kind; empty where `refused`.
        seconds: of a step; None where `refused`.
        sent, received: bytes of a rank in a step; where steps differ, the mean of a period.
        samples: in a step, over all ranks.
        efficiency: of what its GPUs compute in the time, to computing alone.
        refused: why it cannot train this; "" where it can.
        limit: bytes of a card.
        note: what the numbers stand for, where that is not one step like all others; else "".
        exact: whether it computes what one process would, up to rounding.
        servers: of a training with parameter servers, what they hold and carry; else None.
    """

    name: str
    lines: dict[str, Any]
    memory: dict[str, int]
    seconds: StepTime | None
    sent: float
    received: float
    samples: int
    limit: float
    refused: str = ""
    note: str = ""
    exact: bool = True
    servers: ServerLoad | None = None

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return not self.refused and self.peak <= self.limit

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds.total if self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        return self.seconds.compute / self.seconds.total if self.seconds else 0.0

    @property
    def why_not(self) -> str:
        """Why it cannot be taken; "" where it can."""
        if self.refused or self.fits:
            return self.refused
        largest = max(self.memory, key=lambda kind: self.memory[kind])
        return (
            f"takes {self.peak / 1e9:.1f} GB, of which {largest} "
            f"{self.memory[largest] / 1e9:.1f} GB"
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain data: bytes, seconds and samples a second."""
        time = self.seconds
        return {
            "strategy": self.name,
            "run_file": self.lines,
            "fits": self.fits,
            "why_not": self.why_not,
            "note": self.note,
            "exact": self.exact,
            "memory": self.memory,
            "servers": None if self.servers is None else self.servers.to_dict(),
            "sent": self.sent,
            "received": self.received,
            "samples_per_second": self.samples_per_second,
            "efficiency": self.efficiency,
            "seconds": None if time is None else {"total": time.total, **asdict(time)},
        }
