"""A worker's part when a server was lost: wait until it is back, and go back with all servers to a
snapshot that all have; and when the worker itself comes again, after the others went on."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from allhands.errors import UserError, WorldError
from allhands.kvstore.server_link import ServerLink
from allhands.kvstore.wait_state import ServerLostError

if TYPE_CHECKING:
    from allhands.kvstore.store_links import StoreLinks

# Seconds for which a lost server is waited for; starting one takes 2 to 10.
RETURN_TIMEOUT = 60.0


def come_back(store: StoreLinks) -> int | None:
    """Go back to the newest step of which all servers have a snapshot; that step. None where no
    server has lost anything, because those that died have fetched it from their mirrors.

    Raises:
        WorldError: a server did not come back, or there is no such step.
    """
    while True:
        try:
            return _once(store)
        except ServerLostError:
            continue  # another one was lost meanwhile


def _once(store: StoreLinks) -> int | None:
    wait_state = store._wait_state
    with wait_state.changed:
        broken = sorted(wait_state.broken)
    for number in broken:
        gone = store.links[number]
        gone.abandon()
        where = _new_place(store, gone)
        wait_state.broken.discard(number)
        store.links[number] = ServerLink(number, where, wait_state, store._said, store._transport)
        store.links[number].comes_back = True
        _carry_over(gone, store.links[number])
    for link in store.links:
        link.forget()
    # With few small keys, a server may hold none of them, and has nothing to go back to.
    holding = {piece.server for pieces in store._pieces.values() for piece in pieces}
    # The same on all workers: the servers' lives.
    occasion = ":".join(str(link.where["life"]) for link in store.links)
    step: int | None = None
    if not store.rules["mirror"] or not all(
        link.ask("mirrored", occasion=occasion)["whole"] for link in store.links
    ):
        step = _common_step(store, broken, holding)
    asked = [
        link.begin(
            "back",
            step=step,
            occasion=occasion,
            empty=not step or link.number not in holding,
            seen=_seen(store, link),
        )
        for link in store.links
    ]
    for link, pending in zip(store.links, asked, strict=True):
        try:
            told: dict[str, Any] = link.answer(pending, "going back to a snapshot")
        except UserError as error:
            raise WorldError(str(error)) from error
        # Since `forget`, square sums of the time before may have come, but none after this answer.
        link.forget_answers()
        if step is not None:
            link.versions = {int(one): version for one, version in told["versions"].items()}
    for link in store.links:
        if not link.shares:  # it is new
            store._share([link], store.pieces_on(link, store.shapes))
    if step is not None:
        store._unread.clear()
    return step


def _common_step(store: StoreLinks, broken: list[int], holding: set[int]) -> int:
    lost = f"server {', '.join(map(str, broken))} was lost"
    if not store.rules["snapshot_every"]:
        raise WorldError(
            f"{lost}, and so was the copy of it that the next server kept; train again from the "
            "last checkpoint, and save snapshots too (snapshot_every=…, snapshot_dir=…) where "
            "several servers may be lost at once"
        )
    known = [set(link.ask("snapshots")["steps"]) for link in store.links if link.number in holding]
    common = set.intersection(*known) if known else {0}
    if not common:
        raise WorldError(
            f"{lost} before there was a snapshot that all servers have; train again from the last "
            "checkpoint, and save snapshots more often (snapshot_every=…)"
        )
    return max(common)


def _seen(store: StoreLinks, link: ServerLink) -> dict[str, int]:
    """The newest versions that this worker knows that a server had, by chunk and table."""
    return {
        # A round of rows is counted when they are pushed.
        str(one.number): link.versions[one.number] - (name in store._kept or name in store.tables)
        for name, one in store.pieces_on(link, store._pieces)
    }


def _new_place(store: StoreLinks, gone: ServerLink) -> dict[str, Any]:
    assert store._find is not None
    began = time.monotonic()
    while time.monotonic() - began < RETURN_TIMEOUT:
        where = store._find(gone.number)
        if where["life"] != gone.where["life"]:
            return where
        time.sleep(0.1)
    raise WorldError(
        f"{gone.name} is gone, and was not started again within {RETURN_TIMEOUT:.0f} s; `allhands "
        "launch --server-restarts N` starts it"
    )


def _carry_over(gone: ServerLink, new: ServerLink) -> None:
    new.down_codec, new.adds, new.versions = gone.down_codec, gone.adds, gone.versions


def join(store: StoreLinks, names: Sequence[str]) -> None:
    """Take part again, in these keys, from rounds on that have begun nowhere."""
    late: set[str] = set()
    while True:
        newest: dict[int, int] = {}
        for link in store.links:
            for number, version in link.ask("versions")["versions"].items():
                # A table has one number on all servers.
                newest[int(number)] = max(version, newest.get(int(number), 0))
        begins = first_rounds(
            {name: max(newest[one.number] for one in store._pieces[name]) for name in names}, late
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
