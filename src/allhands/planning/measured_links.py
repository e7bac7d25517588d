"""Links as `allhands doctor --profile` has measured them: for each kind of collective its times by
the bytes that are sent."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allhands.comm.traffic import Collective
from allhands.errors import UserError
from allhands.planning.machines import rounds_of


@dataclass(frozen=True)
class LinkCurve:
    """Seconds of a collective of one kind by the bytes that a rank sends: a latency for each round
    of a tree, and on top straight lines between the sizes that were measured.

    No line over all sizes comes near: a burst goes at once where a link's rate is shaped, large
    transfers hold up what goes the other way, and gloo cuts them into parts.

    Attributes:
        latency: of one round.
        points: bytes, from 0 on, and seconds beyond the latency; neither falls.
    """

    latency: float
    points: Sequence[tuple[float, float]]

    def __call__(self, sent: float, rounds: int) -> float:
        place = bisect.bisect_left(self.points, (sent, 0.0))
        # Beyond the largest size the last line goes on.
        place = min(max(place, 1), len(self.points) - 1)
        (low, before), (high, after) = self.points[place - 1 : place + 1]
        seconds = before + (after - before) * (sent - low) / (high - low)
        return self.latency * rounds + seconds


@dataclass(frozen=True)
class LinkTimes:
    """What a collective of one kind takes.

    Attributes:
        seconds: of the collective.
        cpu: of them, those of the processor in the process.
    """

    seconds: LinkCurve
    cpu: LinkCurve


@dataclass(frozen=True)
class MeasuredLinks:
    """Times by the kind of a collective, within a host and between hosts; see
    `allhands.planning.machines.Links`, in whose place they are. One of the two may be empty, for
    which the other stands in then."""

    inside: Mapping[str, LinkTimes]
    between: Mapping[str, LinkTimes]

    def seconds(self, sent: float, kind: str, size: int, hosts: int) -> float:
        return self._times(kind, hosts).seconds(sent, rounds_of(kind, size))

    def cpu(self, sent: float, kind: str, size: int, hosts: int) -> float:
        """The processor's seconds of the same."""
        return self._times(kind, hosts).cpu(sent, rounds_of(kind, size))

    def _times(self, kind: str, hosts: int) -> LinkTimes:
        times = (self.between or self.inside) if hosts > 1 else (self.inside or self.between)
        # What is not measured is as slow as a message.
        return times.get(kind) or times["send"]


def links_of(found: Any, path: Path) -> MeasuredLinks | None:
    """The links of a profile; None where it has none.

    Args:
        found: what it says of them.
        path: of the profile, for messages.
    """
    if not found:
        return None
    try:
        times = {place: _times(one["kinds"], one["ranks"]) for place, one in found.items()}
        links = MeasuredLinks(times.get("inside", {}), times.get("between", {}))
        if any(times[place].keys() < {"send", "all_reduce"} for place in found):
            raise KeyError("send")
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        raise UserError(
            f"{path} has no times of collectives; `allhands doctor -H d1,d2 --profile FILE` writes "
            "them"
        ) from None
    return links


def _times(kinds: Mapping[str, Sequence[Mapping[str, Any]]], ranks: int) -> dict[str, LinkTimes]:
    return {
        kind: LinkTimes(_curve(kind, rows, ranks, "seconds"), _curve(kind, rows, ranks, "cpu"))
        for kind, rows in kinds.items()
        if rows
    }


def _curve(kind: str, rows: Sequence[Mapping[str, Any]], ranks: int, value: str) -> LinkCurve:
    sent = [Collective(kind, int(row["bytes"]), ranks).sent for row in rows]
    seconds = _rising([float(row[value]) for row in rows])
    # Down to nothing by the first line.
    first = (sent[0], seconds[0])
    (low, before), (high, after) = (first, (sent[1], seconds[1])) if sent[1:] else ((0, 0), first)
    latency = max(0.0, before - low * (after - before) / (high - low))
    points = [(0.0, 0.0), *((size, s - latency) for size, s in zip(sent, seconds, strict=True))]
    return LinkCurve(latency / rounds_of(kind, ranks), points)


def _rising(values: Sequence[float]) -> list[float]:
    """The values that never fall and come closest to measured ones: means of those that do."""
    runs: list[list[float]] = []
    for value in values:
        run = [value]
        while runs and statistics.fmean(runs[-1]) > statistics.fmean(run):
            run = runs.pop() + run
        runs.append(run)
    return [statistics.fmean(run) for run in runs for _ in run]
