"""Slurm's short forms, expanded here because `scontrol` is not on every compute node and costs a
process a rank.
"""

from __future__ import annotations

import itertools
import re

from allhands.errors import UserError

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
# more is a typing error such as n[1-10000000], and expanding it would exhaust the memory
_MOST_HOSTS = 100_000


def expand_hosts(text: str) -> list[str]:
    """The host names that a Slurm host list stands for, in its order.

    `n[1-3,7],m05` gives n1 n2 n3 n7 m05; `a,b[01-02]` keeps the zeros: a b01 b02; several brackets
    multiply: `r[1-2]n[1-2]` gives r1n1 r1n2 r2n1 r2n2. Raises `UserError` on anything that is no
    host list.
    """
    hosts: list[str] = []
    for part in _split(text):
        pieces = [_alternatives(piece, text) for piece in re.split(r"(\[[^\]]*\])", part) if piece]
        hosts += ["".join(choice) for choice in itertools.product(*pieces)]
        if len(hosts) > _MOST_HOSTS:
            raise _no_list(text, f"it stands for more than {_MOST_HOSTS} hosts")
    if not hosts:
        raise _no_list(text, "it is empty")
    return hosts


def expand_tasks(text: str) -> list[int]:
    """Tasks on each node from Slurm's count list: `2(x2),1` gives [2, 2, 1]. Raises `UserError` on
    anything else.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise UserError(
                f"{text!r} is not a Slurm task count such as '2(x2),1' (stopped at {part!r})."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """Cut at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
        if depth not in (0, 1):
            raise _no_list(text, f"the brackets do not match at letter {place + 1}")
    if depth:
        raise _no_list(text, "a bracket is not closed")
    parts.append(text[start:])
    if text.strip() and any(not part.strip() for part in parts):
        raise _no_list(text, "a name between two commas is empty")
    return [part.strip() for part in parts if part.strip()]


def _alternatives(piece: str, text: str) -> list[str]:
    if not piece.startswith("["):
        return [piece]
    names: list[str] = []
    for entry in piece[1:-1].split(","):
        first, dash, last = entry.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
            raise _no_list(text, f"{entry!r} is not a number or a range such as 01-03")
        if int(last) - int(first) >= _MOST_HOSTS:
            raise _no_list(text, f"{entry!r} stands for more than {_MOST_HOSTS} hosts")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names


def _no_list(text: str, reason: str) -> UserError:
    return UserError(f"{text!r} is not a Slurm host list such as 'n[1-3,7],m05': {reason}.")
