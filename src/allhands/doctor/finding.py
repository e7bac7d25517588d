"""What the examination found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "problem"]

# Findings on all hosts together have this instead of a host's name.
TOGETHER = ""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        host: where; "" for what concerns several hosts together.
        check: which of `CHECKS`.
        status: "problem" keeps a job from running, or will break it; "warning" may slow it down or
            break it later.
        found: what is the case.
        advice: what to do, or what to know; "" when there is nothing.
        values: the numbers behind it; the names say the units.
    """

    host: str
    check: str
    status: Status
    found: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


# In the order in which they are shown.
CHECKS = (
    "ssh",
    "shell",
    "rsync",
    "python",
    "versions",
    "clock",
    "names",
    "network",
    "ports",
    "link",
    "gpus",
    "cores",
    "memory",
    "shm",
    "limits",
    "folder",
    "sharing",
    "slurm",
    "all-reduce",
)


@dataclass(frozen=True)
class Report:
    """All findings.

    Attributes:
        hosts: the names of those that were examined, in their order; the first is this machine.
        findings: in the order of hosts and checks.
        seconds: how long it took.
    """

    hosts: Sequence[str]
    findings: Sequence[Finding]
    seconds: float

    @property
    def problems(self) -> list[Finding]:
        """The findings that keep a job from running."""
        return [finding for finding in self.findings if finding.status == "problem"]

    @property
    def warnings(self) -> list[Finding]:
        """The findings that may harm a job."""
        return [finding for finding in self.findings if finding.status == "warning"]


def size(count: float | None) -> str:
    """A number of bytes for a reader: `1.5 GiB`."""
    if count is None:
        return "an unknown number of bytes"
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
