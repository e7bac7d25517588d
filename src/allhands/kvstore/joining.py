"""A worker's part when it comes again, after the others went on without it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allhands.kvstore.connected import Connected


def join(store: Connected, names: Sequence[str]) -> None:
    """Take part again, in these keys, from rounds on that have begun nowhere."""
    late: set[str] = set()
    while True:
        newest: dict[int, int] = {}
        for link in store.links:
            for number, version in link.ask("versions")["versions"].items():
                # A table has one number on all servers.
                newest[int(number)] = max(version, newest.get(int(number), 0))
        begins = first_rounds(
            {name: max(newest[one.number] for one in store._pieces[name]) for name in names},
            late,
        )
        found = {name for link in store.links for name in link.ask("join", begins=begins)["late"]}
        if not found:
            break
        late |= found
    for name in names:
        for piece in store._pieces[name]:
            store.links[piece.server].versions[piece.number] = (
                begins[name] - 1 if store._sync else newest[piece.number]
            )


def first_rounds(newest: Mapping[str, int], late: Collection[str] = ()) -> dict[str, int]:
    """From which rounds on a worker that came again counts, by key.

    It is the next one, at which a key stays that is not pushed any more; or the one after that
    where the next one has begun, as it may be over on one server before the worker has asked
    another. Keys whose rounds are at most one apart are stepped together, and begin together.

    Args:
        newest: the newest round of each key.
        late: keys whose next round had begun on some server when the worker asked to be counted.
    """
    begins: dict[str, int] = {}
    together: list[str] = []
    for name in sorted(newest, key=lambda name: newest[name]):
        if together and newest[name] > newest[together[-1]] + 1:
            together = []
        together.append(name)
        begins |= dict.fromkeys(
            together, newest[name] + (1 if set(late).isdisjoint(together) else 2)
        )
    return begins
