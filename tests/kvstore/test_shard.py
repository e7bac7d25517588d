"""One server's part of the store, without connections."""

from __future__ import annotations

import threading
from typing import Any

import torch

from allhands.kvstore.parts import Meta
from allhands.kvstore.rules import rules_of
from allhands.kvstore.shard import Shard
from allhands.kvstore.shard_recovery import ShardRecovery
from allhands.kvstore.store_modes import mode_named

STEP = 7


class Worker:
    """A worker's session; what it was told."""

    def __init__(self, shard: Shard, rank: int) -> None:
        self.rank, self.occasion, self.life = rank, "", "one"
        self.told: list[dict[str, Any]] = []
        self.replies = 0
        shard.members.connect(self)

    def tell(self, fields: dict[str, Any]) -> None:
        self.told.append(fields)

    def reply(self, request: int, **fields: Any) -> None:
        assert "error" not in fields
        self.replies += 1

    def finished(self, *_: Any) -> None: ...

    def give(self, chunk: Any) -> None: ...

    def squares(self) -> list[dict[int, float]]:
        """The square sums of a step, each time it was told them."""
        told = [one["squares"] for one in self.told if one["op"] == "squares"]
        return [{number: round(square, 6) for number, square in one} for one in told]


def _two_keys() -> tuple[Shard, list[Worker]]:
    shard = Shard(0, 2, 2, rules_of(mode_named("dist"), {}))
    shard.recovery = ShardRecovery(None)
    shard.create([[number, f"k{number}", 0, "float32", 0, 2, True] for number in range(2)])
    for chunk in shard.chunks():
        shard.initialise(chunk, torch.zeros(2))
    return shard, [Worker(shard, rank) for rank in range(2)]


def _announce(shard: Shard, worker: Worker) -> Meta:
    meta = Meta(worker, STEP, 1.0, None, None, 0.5, 2)
    shard.announce(meta)
    return meta


def _push(shard: Shard, number: int, meta: Meta) -> None:
    values = torch.full((2,), 3.0 + number)
    shard.push(shard.parts[number], 1, meta, values, lambda: None, wanted=False)


def _back(shard: Shard, worker: Worker, occasion: str) -> None:
    assert shard.recovery is not None
    said = {"occasion": occasion, "step": None, "empty": False, "seen": {}}
    shard.recovery.go_back(shard, worker, 1, said)


def test_a_commit_from_before_all_parts_are_in_closes_nothing() -> None:
    """It is of the time before a server was lost; the open step still needs its own."""
    shard, workers = _two_keys()
    metas = [_announce(shard, one) for one in workers]
    for meta in metas:
        _push(shard, 0, meta)
    shard.commit(STEP, 0.1)
    assert shard.parts[0].version == 0
    for meta in metas:
        _push(shard, 1, meta)
    assert [one.squares() for one in workers] == [[{0: 72.0, 1: 128.0}]] * 2
    shard.commit(STEP, 0.25)
    shard.commit(STEP, 0.1)  # the other worker's
    assert [part.version for part in shard.parts.values()] == [1, 1]
    assert [float(chunk.weights[0]) for chunk in shard.chunks()] == [1.5, 2.0]


def test_a_round_that_ends_while_the_servers_go_back_leaves_nothing() -> None:
    shard, workers = _two_keys()
    metas = [_announce(shard, one) for one in workers]
    _push(shard, 1, metas[0])
    part, inside, go_on = shard.parts[1], threading.Event(), threading.Event()
    combine = part.combine

    def late() -> float:
        inside.set()
        assert go_on.wait(10)
        return combine()

    part.combine = late
    push = threading.Thread(target=_push, args=(shard, 1, metas[1]))
    push.start()
    assert inside.wait(10)
    back = threading.Thread(target=_back, args=(shard, workers[0], "lost"))
    back.start()
    while shard.recovery.occasion != "lost":  # type: ignore[union-attr]
        pass
    back.join(0.2)  # it waits for the part's lock
    go_on.set()
    push.join(10)
    back.join(10)
    part.combine = combine
    _back(shard, workers[1], "lost")
    assert [one.replies for one in workers] == [1, 1]
    for one in workers:
        one.told.clear()
    metas = [_announce(shard, one) for one in workers]
    for meta in metas:
        _push(shard, 0, meta)
    assert [one.squares() for one in workers] == [[], []]
    for meta in metas:
        _push(shard, 1, meta)
    assert [one.squares() for one in workers] == [[{0: 72.0, 1: 128.0}]] * 2
