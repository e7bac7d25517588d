"""Workers that come again, come late, leave or never come while others train: the exact numbers, in
time, with the reason."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from allhands.errors import WorldError
from allhands.kvstore.served import ServedStore
from tests.kvstore.losing import (
    LEASE,
    LOST_AT,
    STEPS,
    Values,
    crash,
    first,
    member,
    reference,
    update,
)
from tests.kvstore.serving import job


@pytest.mark.parametrize("transport", ["tcp", "shared"])
@pytest.mark.parametrize("rank_lost", [0, 1])
def test_a_worker_that_was_started_again_joins_from_a_round_on(
    rank_lost: int, transport: str
) -> None:
    end, wait_at = 12, 6
    with job(3, 2, LEASE) as made:
        back = threading.Event()

        def work(rank: int) -> Any:
            store, outs, step, numbers = member(made, rank, transport=transport), first(), 0, []
            while step < end:
                if step == LOST_AT and rank == rank_lost and store in made.stores[:3]:
                    crash(store)
                    while (
                        min(chunk.version for chunk in made.servers[0].shards[0].chunks())
                        < wait_at - 1
                    ):
                        time.sleep(0.01)
                    store = member(made, rank, life="two", transport=transport)
                    back.set()
                    for name, out in outs.items():
                        store.pull(name, out)
                    step = store._version()
                    continue
                if step == wait_at and rank != rank_lost:
                    assert back.wait(20.0)
                taken = update(store, outs, step)
                numbers.append((taken.number, taken.workers))
                step += 1
            return outs, numbers

        results = made.run(work)
        others = {0, 1, 2} - {rank_lost}
        numbers = results[min(others)][1]
        assert [number for number, _ in numbers] == list(range(1, end + 1))
        counts = [workers for _, workers in numbers]
        joined = LOST_AT + counts[LOST_AT:].index(3)
        # It may be there before the others begin the round after which they wait for it.
        assert wait_at - 1 <= joined <= wait_at + 1
        assert counts == [3] * LOST_AT + [2] * (joined - LOST_AT) + [3] * (end - joined)
        assert results[rank_lost][1] == [
            one for one in numbers if one[0] <= LOST_AT or one[0] > joined
        ]
        expected = reference([{0, 1, 2} if count == 3 else others for count in counts])
        for outs, _ in results:
            for name, value in expected.items():
                assert torch.equal(outs[name], value)


def test_worker_0_that_was_lost_before_it_gave_the_values_gives_them_when_it_comes_again() -> None:
    with job(2, 2, LEASE) as made:

        def work(rank: int) -> Values:
            if rank == 0:
                crash(made.store(0, on_worker_loss="continue"))
                time.sleep(0.3)
            store, outs = member(made, rank, life="two" if rank == 0 else "one"), first()
            for name, out in outs.items():
                out.zero_()
                if rank == 1:  # what a first update would bring, without one of this worker
                    store.pull(name, out)
            return outs

        for name, value in made.run(work)[1].items():
            assert torch.equal(value, first()[name])


@pytest.mark.parametrize("rule", ["stop", "continue"])
def test_a_worker_that_closes_in_mid_training_is_no_loss(rule: str) -> None:
    with job(3, 2, LEASE) as made:

        def work(rank: int) -> Values:
            store, outs = member(made, rank, on_worker_loss=rule), first()
            for step in range(STEPS if rank != 1 else LOST_AT):
                update(store, outs, step)
            store.close()
            return outs

        expected = reference([{0, 1, 2}] * LOST_AT + [{0, 2}] * (STEPS - LOST_AT))
        results = made.run(work)
        for rank in (0, 2):
            for name, value in expected.items():
                assert torch.equal(results[rank][name], value)


def test_keys_that_are_declared_one_by_one_are_joined_one_by_one() -> None:
    """The rounds of a key do not wait for a worker that came again and has not come to this key
    yet."""
    with job(2, 2, LEASE) as made:

        def pushed(store: ServedStore, name: str) -> float:
            out = torch.empty(2)
            store.pushpull(name, torch.full((2,), 1.0 + store.rank), out)
            return float(out[0])

        def begun(life: str, rank: int) -> ServedStore:
            store = made.store(rank, on_worker_loss="continue", life=life)
            store.init("a", torch.zeros(2))
            return store

        ready, alone, back = threading.Barrier(2), threading.Event(), threading.Event()

        def work(rank: int) -> list[float]:
            store = begun("one", rank)
            store.init("b", torch.zeros(2))
            found = [pushed(store, name) for name in "ab"]
            ready.wait(20.0)
            if rank == 0:
                while made.servers[0].shards[0].members.everyone() != {0}:
                    time.sleep(0.01)
                found += [pushed(store, "a") for _ in range(3)]
                back.set()
                assert alone.wait(20.0)
                found.append(pushed(store, "b"))  # worker 1 has joined "a", and not "b"
                ready.wait(20.0)
                return found + [pushed(store, name) for name in "ab"]
            crash(store)
            assert back.wait(20.0)
            store = begun("two", 1)
            alone.set()
            ready.wait(20.0)
            store.init("b", torch.zeros(2))
            store.pull("a")
            found.append(pushed(store, "a"))
            store.pull("b")
            return [*found, pushed(store, "b")]

        zero, one = made.run(work)
    assert zero == [3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0]
    assert one == [3.0, 3.0, 3.0, 3.0]


def test_first_values_that_nobody_will_give_any_more_are_an_error() -> None:
    with job(2, 1, LEASE) as made:
        here = threading.Event()

        def work(rank: int) -> str:
            store = made.store(rank, on_worker_loss="continue")
            if rank == 0:
                assert here.wait(20.0)
                store.close()
                return ""
            here.set()
            with pytest.raises(WorldError) as raised:
                store.init("a", torch.zeros(2))
            return str(raised.value)

        assert made.run(work)[1] == (
            "worker 0 has left or is lost, and has not given the first values of 'a'; start again"
        )


def test_worker_0_that_is_lost_for_good_before_it_gave_the_values_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALLHANDS_ON_WORKER_FAILURE", "continue")
    with job(2, 1, LEASE) as made:

        def work(rank: int) -> str:
            if rank == 0:
                crash(made.store(0))
                return ""
            with pytest.raises(WorldError) as raised:
                made.store(1).init("a", torch.zeros(2))
            return str(raised.value)

        assert (
            made.run(work)[1]
            == "worker 0 has left or is lost, and has not given the first values of 'a'; start "
            "again"
        )


@pytest.mark.parametrize("late", [False, True])
def test_the_others_go_on_without_a_worker_that_never_comes(late: bool) -> None:
    with job(3, 2, LEASE) as made:
        for server in made.servers:
            server.patience = 0.5
        alone = threading.Event()

        def work(rank: int) -> Any:
            if rank == 1:
                if not late:
                    return None
                assert alone.wait(20.0)
            store, outs, counts = member(made, rank), first(), []
            if rank == 1:
                assert store._again
                return None
            for step in range(LOST_AT):
                counts.append(update(store, outs, step).workers)
            alone.set()
            return outs, counts

        results = made.run(work)
        for rank in (0, 2):
            outs, counts = results[rank]
            assert counts == [2] * LOST_AT
            for name, value in reference([{0, 2}] * LOST_AT).items():
                assert torch.equal(outs[name], value)


@pytest.mark.parametrize(("rule", "absent"), [("stop", 1), ("continue", 0)])
def test_a_worker_that_never_comes_is_named_where_the_others_cannot_go_on(
    rule: str, absent: int
) -> None:
    with job(2, 1, LEASE) as made:
        made.servers[0].patience = 0.5

        def work(rank: int) -> str:
            if rank == absent:
                return ""
            with pytest.raises(WorldError) as raised:
                store = member(made, rank, on_worker_loss=rule)
                update(store, first(), 0)
            return str(raised.value)

        text = made.run(work)[1 - absent]
    if rule == "stop":
        assert text.startswith(
            "worker 1 is lost: it has not connected to server 0 within 0 s of the first worker ("
        )
        assert (
            "ALLHANDS_KVSTORE_START sets how long is waited); worker 0 waits for the other "
            "workers' gradients in step 1" in text
        )
    else:
        assert (
            text == "worker 0 has left or is lost, and has not given the first values of 'a', 'b'; "
            "start again"
        )
