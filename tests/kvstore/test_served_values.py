"""Values that workers push to servers and pull from them: of every form, in every order."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest
import torch

from allhands.kvstore import placement, shard_keys
from allhands.kvstore.chunks import Chunk
from allhands.kvstore.shard import Shard
from tests.kvstore.serving import job


def test_without_an_optimizer_values_are_added_up() -> None:
    def work(rank: int) -> dict[str, Any]:
        store = made.store(rank)
        store.init([3, 7], [torch.full((2, 3), 5.0 + rank), torch.zeros(1, dtype=torch.float64)])
        found: dict[str, Any] = {"first": store.pull(3)}
        store.push(3, torch.full((2, 3), rank + 1.0))
        found["sum"] = store.pull(3)
        half = torch.tensor([0.5], dtype=torch.float64)
        # Two devices.
        store.push([7, 3], [half, [torch.full((2, 3), float(rank)), torch.ones(2, 3)]], priority=-1)
        found["sums"] = store.pull([3, 7])
        store.push(3, torch.full((2, 3), 6.0 * rank), weight=rank + 1)
        several = [torch.empty(2, 3), torch.empty(2, 3)]
        store.pull(3, several)
        found["mean"] = several
        value = torch.full((2, 3), 2.0)
        store.pushpull(3, value)
        found["in place"] = value
        outs = [torch.empty(2, 3), torch.empty(3, 2).t()]
        store.pushpull([3], [[value, value]], [outs], weight=2.0)
        found["devices"] = outs
        store.broadcast(9, torch.full((4,), float(rank + 8)), out := torch.empty(4))
        found["broadcast"] = out
        store.barrier()
        return found

    with job(2, servers=2) as made:
        worlds = made.run(work)
    for found in worlds:
        assert torch.equal(found["first"], torch.full((2, 3), 5.0))  # worker 0's
        assert torch.equal(found["sum"], torch.full((2, 3), 3.0))  # 1 + 2
        assert torch.equal(found["sums"][0], torch.full((2, 3), 3.0))
        assert found["sums"][1].tolist() == [1.0]
        # (0 + 6) / (1 + 2).
        assert all(torch.equal(one, torch.full((2, 3), 2.0)) for one in found["mean"])
        assert torch.equal(found["in place"], torch.full((2, 3), 4.0))
        # (8 + 8) / (2 + 2).
        assert all(torch.equal(one, torch.full((2, 3), 4.0)) for one in found["devices"])
        assert torch.equal(found["broadcast"], torch.full((4,), 8.0))


@pytest.mark.parametrize("transport", ["tcp", "shared"])
def test_values_of_every_form(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_keys, "place", functools.partial(placement.place, chunk_bytes=64))
    generator = torch.Generator().manual_seed(0)
    values = {
        "channels last": torch.randn(2, 3, 4, 5, generator=generator).to(
            memory_format=torch.channels_last
        ),
        "transposed": torch.randn(7, 3, generator=generator).t(),
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "float64": torch.randn(33, generator=generator, dtype=torch.float64),
        "bfloat16": torch.randn(50, generator=generator).bfloat16(),
        "float16": torch.randn(50, generator=generator).half(),
        "int64": torch.arange(40),
    }

    def work(rank: int) -> dict[str, torch.Tensor]:
        store = made.store(rank, transport=transport)
        store.declare(
            {
                name: value if rank == 0 else torch.zeros_like(value)
                for name, value in values.items()
            }
        )
        for name, value in values.items():
            assert torch.equal(store.pull(name), value), name
        names = list(values)
        if rank == 1:
            names.reverse()
        for name in names:
            store.push(name, values[name])
        outs = {
            name: torch.zeros_like(value) for name, value in values.items()
        }  # with the strides of the value
        store.pull(list(outs), list(outs.values()))
        return outs

    with job(2, servers=3) as made:
        for outs in made.run(work):
            for name, out in outs.items():
                assert torch.equal(out, values[name] + values[name]), name


def test_larger_priorities_are_sent_first() -> None:
    order: list[str] = []
    with pytest.MonkeyPatch.context() as patch, job(1) as made:
        push = Shard.push

        def noted(self: Shard, chunk: Chunk, *args: Any) -> None:
            order.append(chunk.key)
            push(self, chunk, *args)

        patch.setattr(Shard, "push", noted)
        store = made.store(0)
        store.init(["a", "b", "c", "d"], [torch.zeros(2)] * 4)
        held, link = threading.Event(), store.links[0]
        link.put(lambda: held.wait(10), priority=1 << 62)  # what follows is queued meanwhile
        while not link._queue.empty():
            time.sleep(0.001)
        for name, priority in (("a", -3), ("b", 0), ("c", 5), ("d", 0)):
            store.push(name, torch.ones(2), priority)
        held.set()
        store.pull(["a", "b", "c", "d"])
    assert order == ["c", "b", "d", "a"]
