"""`SharedSlots`: values that travel through a few slots are those that travel elsewhere, and a slot
is used again when its value has been read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allhands.errors import WorldError
from allhands.kvstore import shared_slots
from allhands.kvstore.placement import CHUNK_BYTES
from allhands.kvstore.shared_slots import SLOTS, SharedSlots
from allhands.kvstore.store import Share
from allhands.kvstore.wire_frames import Flag, Kind, pack
from allhands.kvstore.worker_session import WorkerSession
from tests.kvstore.serving import Job, job

LARGE = CHUNK_BYTES // 4  # numbers of a chunk
COUNT = 8 * LARGE + 3
VALUES = torch.zeros(LARGE)


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_slots, "PATIENCE", 0.0)


@pytest.mark.usefixtures("_at_once")
def test_a_slot_is_free_again_when_the_value_of_its_push_has_come():
    slots = SharedSlots()
    numbers = []
    for chunk in range(SLOTS):
        number, memory = slots.take(chunk, 2, VALUES)
        assert (memory.shape, memory.dtype) == (VALUES.shape, VALUES.dtype)
        memory.fill_(float(chunk))
        numbers.append(number)
    assert sorted(numbers) == list(range(SLOTS))
    assert slots.take(SLOTS, 2, VALUES) is None
    slots.give_back(1, 1)  # of an earlier round
    slots.give_back(SLOTS, 2)  # which had none
    assert slots.take(SLOTS, 2, VALUES) is None
    slots.give_back(1, 2)
    slots.give_back(1, 3)
    number, memory = slots.take(SLOTS, 2, VALUES)
    assert number == numbers[1]
    assert memory[0] == 1.0
    assert slots.take(SLOTS + 1, 2, VALUES) is None


def test_small_values_and_those_that_are_too_large_take_no_slot():
    slots = SharedSlots()
    assert slots.take(0, 1, torch.zeros(100)) is None
    assert slots.take(0, 1, torch.zeros(LARGE + 1)) is None
    assert slots.take(0, 1, VALUES) is not None


def test_after_a_wait_in_vain_nothing_waits_until_another_value_has_come(
    monkeypatch: pytest.MonkeyPatch,
):
    slots, waits = SharedSlots(), []
    for chunk in range(SLOTS):
        slots.take(chunk, 1, VALUES)
    take = slots._free.get

    def noted(block: bool, seconds: float) -> int:
        waits.append(block)
        return take(block, 0.0)

    monkeypatch.setattr(slots._free, "get", noted)
    for chunk in range(3):
        assert slots.take(SLOTS + chunk, 1, VALUES) is None
    slots.give_back(0, 1)
    assert slots.take(SLOTS, 1, VALUES) is not None
    assert slots.take(SLOTS + 1, 1, VALUES) is None
    assert waits == [True, False, False, True, True]


def _through(made: Job, patch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each push that comes from now on lies in a slot."""
    slotted: list[bool] = []
    values = WorkerSession._values

    def noted(self: WorkerSession, frame: Any, chunk: Any) -> Any:
        slotted.append(bool(frame.flags & Flag.SLOT))
        return values(self, frame, chunk)

    patch.setattr(WorkerSession, "_values", noted)
    return slotted


@pytest.mark.parametrize("patience", [0.0, 5.0])
@pytest.mark.parametrize(
    ("kind", "optimizer"), [("dist", None), ("dist", "sgd"), ("dist_async", "sgd")]
)
def test_values_are_the_same_through_slots_and_elsewhere(
    monkeypatch: pytest.MonkeyPatch, patience: float, kind: str, optimizer: str | None
):
    monkeypatch.setattr(shared_slots, "PATIENCE", patience)
    workers = 1 if kind == "dist_async" else 2
    drawn = torch.Generator().manual_seed(1)
    given = [[torch.randn(COUNT, generator=drawn) for _ in range(3)] for _ in range(workers)]
    found = []
    for transport in ("shared", "tcp"):
        with job(workers) as made:
            slotted = _through(made, monkeypatch)

            def work(rank: int, made: Job = made, transport: str = transport) -> torch.Tensor:
                store = made.store(rank, kind, transport=transport)
                store.init("w", torch.ones(COUNT))
                if optimizer:
                    store.set_optimizer(optimizer, learning_rate=0.1, momentum=0.9)
                outs = []
                for value in given[rank]:
                    sent, out = value.clone(), torch.empty(COUNT)
                    store.pushpull("w", sent, out)
                    assert torch.equal(sent, value)  # the caller's own stays as it is
                    sent.fill_(torch.nan)  # and may be changed at once
                    outs.append(out)
                return torch.stack(outs)

            results = made.run(work)
            assert any(slotted) == (transport == "shared")
            assert patience == 0.0 or transport == "tcp" or all(slotted[workers * 9 :])
            assert all(torch.equal(results[0], one) for one in results)
            found.append(results[0])
    assert torch.equal(*found)


def test_workers_that_push_in_another_order_do_not_wait_for_one_another():
    with job(2) as made:

        def work(rank: int) -> list[float]:
            store = made.store(rank, transport="shared")
            store.init(["a", "b"], [torch.zeros(COUNT)] * 2)
            keys = ["a", "b"] if rank else ["b", "a"]
            outs = [torch.empty(COUNT), torch.empty(COUNT)]
            store.pushpull(keys, [torch.full((COUNT,), 1.0 + (key == "b")) for key in keys], outs)
            return [float(outs[keys.index(key)].unique()) for key in ("a", "b")]

        assert made.run(work) == [[2.0, 4.0]] * 2


def test_servers_that_come_back_read_no_slot(monkeypatch: pytest.MonkeyPatch):
    with job(1, 2) as made:
        slotted = _through(made, monkeypatch)
        store = made.store(0, transport="shared", mirror=True)
        for link in store.links:
            link.comes_back = True  # as where the servers can be found again
        store.init("w", torch.zeros(COUNT))
        out = torch.empty(COUNT)
        store.pushpull("w", torch.ones(COUNT), out)
        assert (float(out.unique()), any(slotted)) == (1.0, False)


def test_a_slot_that_is_not_there_ends_the_worker_and_not_the_server():
    with job(1) as made:
        store = made.store(0, transport="shared")
        store.init("w", torch.zeros(COUNT))
        link = store.links[0]
        store.barrier()
        _, meta, _ = store._begin(["w"], Share(), None, None)
        flags = Flag.SHARED | Flag.SLOT | Flag.WANTED
        link.put(pack(Kind.PUSH, flags, 0, meta, 1, 1) + bytes([SLOTS]))
        with pytest.raises(WorldError, match="its connection ended"):
            store.barrier()
        (shard,) = made.servers[0].shards.values()
        assert f"slot {SLOTS} of " in (shard.failure or "")
