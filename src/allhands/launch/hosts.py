"""The hosts of a job, as the user writes them, and which worker goes to which host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allhands.errors import UserError

# What ssh and Slurm call a host, never something that a shell or ssh could take for an option.
_NAME = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9a-fA-F:.%a-z]+\])"
)
_EXAMPLE = "d1, d1 slots=4, ubuntu@d1:2222"


@dataclass(frozen=True)
class HostSpec:
    """One host.

    Attributes:
        name: as the user wrote it, without user and port; a name of ``~/.ssh/config`` as well as an
            address.
        user: whom to log in as; None leaves it to ssh.
        port: of its ssh server; None leaves it to ssh.
        slots: how many workers it takes at most; None when the user set no bound.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None


def read_hosts(text: str) -> list[HostSpec]:
    """The hosts of a file (one a line, ``#`` begins a comment), or of a list such as
    ``d1,d2:2222``.

    A line is ``host``, ``user@host:port``, or one of them followed by ``slots=N``. Addresses of
    IPv6 stand in brackets.
    """
    path = Path(text).expanduser()
    if path.is_file():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--hosts {text}: the file cannot be read: {error}") from None
        numbered = [
            (f"{text}, line {number}", line.partition("#")[0].split())
            for number, line in enumerate(lines, 1)
        ]
    elif "/" in text or path.suffix in (".txt", ".hosts"):
        raise UserError(f"--hosts {text}: there is no such file")
    else:
        numbered = [(f"--hosts {text}", part.split()) for part in text.split(",")]
    hosts = [_host(place, words) for place, words in numbered if words]
    if not hosts:
        raise UserError(f"--hosts {text}: it names no host; write one a line, such as {_EXAMPLE}")
    seen: set[tuple[str, int | None]] = set()
    for host in hosts:
        if (host.name, host.port) in seen:
            raise UserError(
                f"--hosts {text}: {host.name} is named twice; write it once, with slots=N for N "
                "workers"
            )
        seen.add((host.name, host.port))
    return hosts


def _host(place: str, words: list[str]) -> HostSpec:
    name, *settings = words
    match = _NAME.match(name)
    rest = name[match.end() :] if match else name
    if match is None or (rest and not re.fullmatch(r":[0-9]+", rest)):
        raise UserError(f"{place}: {name!r} is no host; write for example {_EXAMPLE}")
    port = int(rest[1:]) if rest else None
    if port is not None and not 0 < port < 2**16:
        raise UserError(f"{place}: {name!r} has port {port}; it must be between 1 and 65535")
    slots = None
    for setting in settings:
        key, _, value = setting.partition("=")
        if (
            key not in ("slots", "max_slots", "max-slots")
            or not value.isdecimal()
            or int(value) < 1
        ):
            raise UserError(
                f"{place}: {setting!r} is not understood; after a host's name only slots=N may "
                "follow, N at least 1"
            )
        slots = int(value) if key == "slots" or slots is None else slots
    return HostSpec(match["host"].strip("[]"), match["user"], port, slots)


def deal(hosts: Sequence[str], slots: Sequence[int | None], workers: int) -> list[int]:
    """How many workers each host gets; neighbouring ranks share a host.

    Hosts with slots are filled in their order, as MPI does. Where no host has slots, the workers
    are dealt evenly and the first hosts get those that are left over.

    Args:
        hosts: names, for the message.
        slots: the bound of each host.
        workers: how many there are.

    Raises:
        UserError: the slots are too few.
    """
    if all(bound is None for bound in slots):
        each, more = divmod(workers, len(hosts))
        return [each + (index < more) for index in range(len(hosts))]
    # One bound set and another left open: MPI counts the latter as a single slot.
    bounds = [1 if bound is None else bound for bound in slots]
    if sum(bounds) < workers:
        told = ", ".join(f"{name} {bound}" for name, bound in zip(hosts, bounds, strict=True))
        raise UserError(
            f"{workers} workers, but the hosts have {sum(bounds)} slots ({told}); write -n "
            f"{sum(bounds)}, or raise slots=N"
        )
    counts = []
    for bound in bounds:
        counts.append(min(bound, workers))
        workers -= counts[-1]
    return counts
