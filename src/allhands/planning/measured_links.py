"""Links as `allhands doctor --profile` has measured them: for each kind of collective a latency and
a bandwidth that are fitted to its times."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allhands.comm.traffic import Collective
from allhands.errors import UserError
from allhands.planning.machines import rounds_of


@dataclass(frozen=True)
class LinkFit:
    """What a collective of one kind takes: ``latency * rounds + per_byte * sent`` seconds.

    Attributes:
        latency, per_byte: of the collective.
        cpu_latency, cpu_per_byte: likewise of the processor's time in the process.
        error: of the measured times, the largest relative distance from the fit.
    """

    latency: float
    per_byte: float
    cpu_latency: float
    cpu_per_byte: float
    error: float


@dataclass(frozen=True)
class MeasuredLinks:
    """Fits by the kind of a collective, within a host and between hosts; see
    `allhands.planning.machines.Links`, in whose place they are. One of the two may be empty, for
    which the other stands in then."""

    inside: Mapping[str, LinkFit]
    between: Mapping[str, LinkFit]

    @property
    def error(self) -> float:
        """The largest of the fits."""
        return max(fit.error for fits in (self.inside, self.between) for fit in fits.values())

    def seconds(self, sent: float, kind: str, size: int, hosts: int) -> float:
        fit = self._fit(kind, hosts)
        return fit.latency * rounds_of(kind, size) + fit.per_byte * sent

    def cpu(self, sent: float, kind: str, size: int, hosts: int) -> float:
        """The processor's seconds of the same."""
        fit = self._fit(kind, hosts)
        return fit.cpu_latency * rounds_of(kind, size) + fit.cpu_per_byte * sent

    def _fit(self, kind: str, hosts: int) -> LinkFit:
        fits = (self.between or self.inside) if hosts > 1 else (self.inside or self.between)
        # What is not measured is as slow as a message.
        return fits.get(kind) or fits["send"]


def read_links(path: Path) -> MeasuredLinks | None:
    """The links of a profile; None where it has none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("links", {})
        fits = {place: _fits(one["kinds"], one["ranks"]) for place, one in found.items()}
        links = MeasuredLinks(fits.get("inside", {}), fits.get("between", {}))
        if not found:
            return None
        if any(fits[place].keys() < {"send", "all_reduce"} for place in found):
            raise KeyError("send")
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        raise UserError(
            f"{path} has no times of collectives; `allhands doctor -H d1,d2 --profile FILE` writes "
            "them"
        ) from None
    return links


def _fits(kinds: Mapping[str, Sequence[Mapping[str, float]]], ranks: int) -> dict[str, LinkFit]:
    return {kind: _fit(kind, rows, ranks) for kind, rows in kinds.items() if rows}


def _fit(kind: str, rows: Sequence[Mapping[str, Any]], ranks: int) -> LinkFit:
    rounds = rounds_of(kind, ranks)
    sent = [Collective(kind, int(row["bytes"]), ranks).sent for row in rows]
    seconds = [float(row["seconds"]) for row in rows]
    latency, per_byte = _line(rounds, sent, seconds)
    cpu = _line(rounds, sent, [max(float(row["cpu"]), 1e-9) for row in rows])
    error = max(
        abs(latency * rounds + per_byte * size - one) / one
        for size, one in zip(sent, seconds, strict=True)
    )
    return LinkFit(latency, per_byte, *cpu, error)


def _line(rounds: int, sent: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Latency and seconds a byte, neither below 0, that come closest to measured values, relative
    to each of them."""
    ones = [rounds / value for value in values]
    sizes = [size / value for size, value in zip(sent, values, strict=True)]
    aa, bb = math.fsum(x * x for x in ones), math.fsum(y * y for y in sizes)
    ab = math.fsum(x * y for x, y in zip(ones, sizes, strict=True))
    a, b = math.fsum(ones), math.fsum(sizes)
    determinant = aa * bb - ab * ab
    if determinant > 0:
        latency, per_byte = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if latency >= 0 and per_byte >= 0:
            return latency, per_byte
        if latency < 0:
            return 0.0, b / bb
    return a / aa, 0.0
