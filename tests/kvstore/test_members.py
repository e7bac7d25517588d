"""Workers that are lost or hang while others train: the exact numbers, in time, with the reason."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import pytest
import torch

from allhands.errors import WorldError
from allhands.kvstore.chunks import Chunk
from allhands.kvstore.comeback import first_rounds
from allhands.kvstore.members import KeyRounds, Members
from allhands.kvstore.served import ServedStore
from allhands.kvstore.store import Share
from allhands.kvstore.wire_frames import Kind, pack
from tests.kvstore.losing import (
    LEASE,
    LOST_AT,
    STEPS,
    WEIGHTS,
    crash,
    first,
    gradients,
    member,
    reference,
    update,
)
from tests.kvstore.serving import job
from tests.patience import patience


def _lost(store: ServedStore, how: str, clip: float | None) -> None:
    """Be lost in the middle of step LOST_AT."""
    grads, share = gradients(store.rank, LOST_AT), Share(WEIGHTS[store.rank], 1.0)
    if how in ("mid-chunk", "between chunks"):
        _, meta, involved = store._begin(list(grads), share, None, clip)
        store._settle()
        for link in involved:
            here = [piece for piece in store._pieces["b"] if piece.server == link.number]
            assert len(here) > 1
            values = grads["b"][here[0].start : here[0].stop].numpy().tobytes()
            sent = values if how == "between chunks" else values[: len(values) // 2]
            link._up.sendall(
                pack(Kind.PUSH, 0, here[0].number, meta, LOST_AT + 1, len(values)) + sent
            )
        if how == "between chunks":
            store._settle()
    elif how == "after push":
        store._send(grads, None, share, None, clip)
        store._settle()
    elif (
        how == "clipped"
    ):  # all have pushed, and nobody has told the servers by how much to multiply

        def norm(*_: Any) -> None:
            while not all(link.squares for link in store.links):
                time.sleep(0.01)
            crash(store)
            raise ConnectionAbortedError

        store._clip = norm  # type: ignore[method-assign]
        with contextlib.suppress(ConnectionAbortedError):
            update(store, first(), LOST_AT, clip)
        return
    if how == "hung":
        _no_beats(store)
    else:
        crash(store)


def _no_beats(store: ServedStore) -> None:
    beat = pack(Kind.BEAT)
    for link in store.links:
        queue = link.first
        link.first = lambda *parts, queue=queue: None if parts == (beat,) else queue(*parts)  # type: ignore[method-assign]


@pytest.mark.parametrize("transport", ["tcp", "shared"])
@pytest.mark.parametrize(
    "how",
    ["before push", "mid-chunk", "between chunks", "after push", "clipped", "hung", "two at once"],
)
def test_the_others_finish_the_step_without_the_lost_worker(how: str, transport: str) -> None:
    clip = 0.25 if how in ("clipped", "before push") else None
    lost = {1, 2} if how == "two at once" else {1}
    longest = [0.0]
    with job(3, 2, LEASE) as made:
        gone = threading.Barrier(3)

        def work(rank: int) -> Any:
            store, outs, workers = member(made, rank, transport=transport), first(), []
            for step in range(STEPS):
                if step == LOST_AT:
                    gone.wait(20.0)
                    if rank in lost:
                        _lost(store, how, clip)
                        return store
                began = time.monotonic()
                workers.append(update(store, outs, step, clip).workers)
                if step == LOST_AT:
                    longest[0] = max(longest[0], time.monotonic() - began)
            return outs, workers

        results = made.run(work)
        assert longest[0] < LEASE + 1.0
        counted = {0, 1, 2} if how in ("after push", "clipped") else {0, 1, 2} - lost
        took_part = [{0, 1, 2}] * LOST_AT + [counted] + [{0, 1, 2} - lost] * (STEPS - LOST_AT - 1)
        expected = reference(took_part, clip)
        for rank in {0, 1, 2} - lost:
            outs, workers = results[rank]
            assert workers == [len(ranks) for ranks in took_part]
            for name, value in expected.items():
                if clip is None:
                    assert torch.equal(outs[name], value)
                else:  # the servers' square sums are of chunks
                    torch.testing.assert_close(outs[name], value, rtol=1e-6, atol=1e-6)
        if how == "hung":
            with pytest.raises(
                WorldError,
                match=r"go on without this worker: worker 1 \(host .*, process \d+\) is lost: no "
                r"sign",
            ):
                update(results[1], first(), LOST_AT)


def test_a_barrier_opens_when_the_one_that_is_missing_is_lost() -> None:
    with job(3, 2, LEASE) as made:

        def work(rank: int) -> float:
            store = member(made, rank)
            store.barrier()
            if rank == 1:
                time.sleep(0.3)
                crash(store)
                return 0.0
            began = time.monotonic()
            store.barrier()
            return time.monotonic() - began

        waited = made.run(work)
        assert 0.2 < min(waited[0], waited[2]) <= max(waited) < LEASE + 1.0


@pytest.mark.parametrize("how", ["before push", "mid-chunk", "hung"])
def test_where_a_loss_stops_all_each_one_is_told_who_was_lost_and_why(how: str) -> None:
    why = "no sign of life for" if how == "hung" else "its connection ended without a goodbye"
    with job(3, 2, LEASE) as made:
        gone = threading.Barrier(3)  # the steps before are over on all workers

        def work(rank: int) -> list[str]:
            store, outs = member(made, rank, on_worker_loss="stop"), first()
            for step in range(LOST_AT):
                update(store, outs, step)
            gone.wait(20.0)
            if rank == 1:
                _lost(store, how, None)
                return []
            told, began = [], time.monotonic()
            for _ in range(2):  # the second call has the reason too
                with pytest.raises(WorldError) as raised:
                    update(store, outs, LOST_AT)
                told.append(str(raised.value))
            assert time.monotonic() - began < LEASE + patience(1.0)
            return told

        for told in (found := made.run(work))[0], found[2]:
            for text in told:
                assert f"worker 1 (host {socket.gethostname()}, process " in text
                assert f"is lost: {why}" in text


def test_the_error_after_a_loss_names_the_step_and_the_keys_that_were_waited_for() -> None:
    with job(3, 2, LEASE) as made:

        def work(rank: int) -> str:
            store, outs = member(made, rank, on_worker_loss="stop"), first()
            for step in range(LOST_AT):
                update(store, outs, step)
            if rank == 1:
                chunks = [chunk for server in made.servers for chunk in server.shards[0].chunks()]
                while not all(
                    len(chunk.added) + len(chunk.arrived) == 2 and chunk.version == LOST_AT
                    for chunk in chunks
                ):
                    time.sleep(0.01)
                crash(store)
                return ""
            with pytest.raises(WorldError) as raised:
                update(store, outs, LOST_AT)
            return str(raised.value)

        found = made.run(work)
    for rank in (0, 2):
        assert found[rank].startswith("worker 1 (host ")
        waited = (
            f"; worker {rank} waits for the other workers' gradients in step {LOST_AT + 1}, "
            "for 'a', 'b' of server 0, 1"
        )
        assert found[rank].endswith(waited)


class _Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_who_is_in_a_round_is_settled_once_for_all_chunks_of_a_key() -> None:
    members = Members(3)
    chunks = {number: Chunk(number, "w", 0, 2, 0, torch.zeros(2)) for number in range(2)}
    rounds = KeyRounds(chunks, members, by_key=True)
    workers: list[Any] = [_Worker(rank) for rank in range(3)]
    for worker in workers:
        members.connect(worker)
    assert [
        rounds.arrive(chunks[number], 1, workers[rank])
        for rank, number in [(0, 0), (1, 0), (0, 1), (2, 1)]
    ] == [
        False,
        False,
        True,
        False,
    ]
    assert rounds.state(chunks[0]) == ({0, 1, 2}, {0}, False)
    members.remove(workers[1])
    rounds.look_again(1)
    assert rounds.arrive(chunks[1], 1, workers[1]) is None  # what was still under way
    assert rounds.state(chunks[0]) == ({0, 2}, {0}, False)
    assert rounds.arrive(chunks[0], 1, workers[2]) is True
    assert rounds.state(chunks[0]) == rounds.state(chunks[1]) == ({0, 2}, {0, 2}, True)
    members.remove(workers[2])  # after its part is whole: it counts
    rounds.look_again(2)
    chunks[0].version = 1
    assert rounds.state(chunks[0]) == ((), (), False)
    assert rounds.state(chunks[1]) == ({0, 2}, {0, 2}, True)


def test_from_which_rounds_a_worker_that_came_again_counts() -> None:
    assert first_rounds({"a": 7, "b": 6, "c": 7}) == {"a": 8, "b": 8, "c": 8}
    assert first_rounds({"a": 7, "b": 6, "seldom": 2}, {"b"}) == {"a": 9, "b": 9, "seldom": 3}
    assert first_rounds({"a": 0}) == {"a": 1}
    assert first_rounds({"a": 0}, {"a"}) == {"a": 2}
