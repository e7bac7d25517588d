"""What the published calls of all ranks mean: which ones cannot end well, and how that is told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from allhands.comm import hook_calls

# What a rank publishes: made, calls, where, ended, hooks (see `published`).
State = dict[str, Any]


def published(base: int, newest: int) -> dict[str, dict[str, Any]]:
    """This rank's calls in hooks by process group, counted from the watch that began after `base`
    noted calls.

    ``{"ranks": members, "from": the first section that is complete, "calls": [[section, call, the
    user's line], …]}``. A call is in section n when n calls were noted before it.
    """
    found = {}
    for name, group in list(hook_calls.logs.items()):
        calls = [
            (section - base, label, where)
            for section, label, where in list(group.calls)
            if section >= base
        ]
        since = calls[-newest][0] + 1 if len(calls) >= newest else 0
        found[name] = {"ranks": list(group.ranks), "from": since, "calls": calls[-newest:]}
    return found


def differing(own: int, states: dict[int, State]) -> tuple[str, bool] | None:
    """The message for ranks whose hooks do not make the same calls, and whether every rank's part
    in it is known.

    A rank is compared with rank `own` in the groups that both are in, and section by section:
    within one, the rank that has made fewer calls may only be slow, until it has noted its next
    call or left.
    """
    for rank, state in states.items():
        if rank == own:
            continue
        for name in {**states[own]["hooks"], **state["hooks"]}:
            members = (state["hooks"].get(name) or states[own]["hooks"][name])["ranks"]
            if own not in members or rank not in members:
                continue
            at = _first_difference(states[own], state, name)
            if at is not None:
                return _told(
                    name, *at, {r: states[r] for r in sorted(states) if r in members}, len(members)
                )
    return None


def _first_difference(one: State, other: State, group: str) -> tuple[int, int] | None:
    """The section and the number in it of the first call that differs for certain."""
    empty = {"from": 0, "calls": []}
    first, second = one["hooks"].get(group, empty), other["hooks"].get(group, empty)
    since = max(first["from"], second["from"])
    for section in sorted(
        {call[0] for call in (*first["calls"], *second["calls"]) if call[0] >= since}
    ):
        mine, theirs = _calls_of(first, section), _calls_of(second, section)
        for number, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if a[1] != b[1]:
                return section, number
        if len(mine) > len(theirs) and _has_passed(other, section):
            return section, len(theirs)
        if len(theirs) > len(mine) and _has_passed(one, section):
            return section, len(mine)
    return None


def _calls_of(log: dict[str, Any], section: int) -> list[list[Any]]:
    return [call for call in log["calls"] if call[0] == section]


def _has_passed(state: State, section: int) -> bool:
    return state["made"] > section or state["ended"] is not None


def _told(
    group: str, section: int, number: int, states: dict[int, State], members: int
) -> tuple[str, bool]:
    calls, places, past = {}, {}, set()
    last = None
    for rank, state in states.items():
        own = _calls_of(state["hooks"].get(group, {"calls": []}), section)
        noted = dict(state["calls"])
        last = noted.get(section, last)
        if number < len(own):
            calls[rank], places[rank] = own[number][1], own[number][2]
        elif state["made"] > section and section + 1 in noted:
            calls[rank], places[rank] = noted[section + 1], state["where"]
            if state["made"] > section + 1:
                past.add(rank)
        elif _has_passed(state, section):
            calls[rank], places[rank] = "the end of the training", state["where"]
    return message(calls, places, past, last), len(calls) == members


def message(
    calls: dict[int, str], places: dict[int, str], past: Iterable[int], last: str | None
) -> str:
    """What to tell about calls that differ: by rank, what each is in (or was in, where it is `past`
    it), and the line."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(calls):
        groups[calls[rank]].append(rank)
    parts = []
    # The odd one out first: it is most often the one that does what it should not.
    for label, ranks in sorted(groups.items(), key=lambda item: (len(item[1]), item[1])):
        verb = "is" if len(ranks) == 1 else "are"
        if any(rank in past for rank in ranks):
            verb = "was" if len(ranks) == 1 else "were"
        where = places[ranks[0]]
        parts.append(f"{in_words(ranks)} {verb} in '{label}'" + (f" ({where})" if where else ""))
    after = f", after '{last}' on all ranks" if last is not None else ""
    return (
        f"the ranks do not make the same calls: {' while '.join(parts)}{after}. Every rank must "
        "make the same calls in the same order: call it on all ranks, without `if rank == 0`"
    )


def in_words(ranks: Iterable[int]) -> str:
    """The ranks as messages name them."""
    found = list(ranks)
    text = ", ".join(map(str, found[:8])) + (
        f" and {len(found) - 8} more" if len(found) > 8 else ""
    )
    return f"rank {text}" if len(found) == 1 else f"ranks {text}"
