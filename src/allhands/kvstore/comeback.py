"""A worker's part when a server was lost: wait until it is back, and go back with all servers to a snapshot that all have."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from allhands.errors import UserError, WorldError
from allhands.kvstore.board import ServerLostError
from allhands.kvstore.link import Link

if TYPE_CHECKING:
    from allhands.kvstore.connected import Connected

# Seconds for which a lost server is waited for; starting one takes 2 to 10.
RETURN_TIMEOUT = 60.0


def come_back(store: Connected) -> int:
    """Go back to the newest step of which all servers have a snapshot; that step.

    Raises:
        WorldError: a server did not come back, or there is no such step.
    """
    while True:
        try:
            return _once(store)
        except ServerLostError:
            continue  # another one was lost meanwhile


def _once(store: Connected) -> int:
    board = store._board
    with board.changed:
        broken = sorted(board.broken)
    for number in broken:
        gone = store.links[number]
        gone.abandon()
        where = _new_place(store, gone)
        board.broken.discard(number)
        store.links[number] = Link(number, where, board, store._said, store._transport)
        store.links[number].comes_back = True
        _carry_over(gone, store.links[number])
    for link in store.links:
        link.forget()
    # With few small keys, a server may hold none of them, and has nothing to go back to.
    holding = {piece.server for pieces in (*store._pieces.values(), *store._tables.values()) for piece in pieces}
    known = [set(link.ask("snapshots")["steps"]) for link in store.links if link.number in holding]
    common = set.intersection(*known) if known else {0}
    if not common:
        raise WorldError(
            f"server {', '.join(map(str, broken))} was lost before there was a snapshot that all servers have; train again from "
            "the last checkpoint, and save snapshots more often (snapshot_every=…)"
        )
    step = max(common)
    # The same on all workers: the servers' lives.
    occasion = ":".join(str(link.where["life"]) for link in store.links)
    asked = [
        link.begin("back", step=step, occasion=occasion, empty=link.number not in holding or not known) for link in store.links
    ]
    for link, pending in zip(store.links, asked, strict=True):
        try:
            told: dict[str, Any] = link.answer(pending, "going back to a snapshot")
        except UserError as error:
            raise WorldError(str(error)) from error
        link.versions = {int(one): version for one, version in told["versions"].items()}
        for name, pieces in store._tables.items():
            version = told["tables"].get(str(pieces[link.number].number))
            if version is not None:
                store._table_versions[name] = version
    for number in broken:
        link = store.links[number]
        here = [(name, one) for name, own in store._pieces.items() for one in own if one.server == number]
        store._share([link], here)
    store._unread.clear()
    return step


def _new_place(store: Connected, gone: Link) -> dict[str, Any]:
    """Where the server that was started again listens."""
    assert store._find is not None
    began = time.monotonic()
    while time.monotonic() - began < RETURN_TIMEOUT:
        where = store._find(gone.number)
        if where["life"] != gone.where["life"]:
            return where
        time.sleep(0.1)
    raise WorldError(
        f"{gone.name} is gone, and was not started again within {RETURN_TIMEOUT:.0f} s; `allhands launch "
        "--server-restarts N` starts it"
    )


def _carry_over(gone: Link, new: Link) -> None:
    new.down_codec, new.adds = gone.down_codec, gone.adds
