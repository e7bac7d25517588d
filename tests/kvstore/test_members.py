"""Workers that are lost, hang, leave or come again while others train: the exact numbers, in time, with the reason."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import pytest
import torch

from allhands.errors import WorldError
from allhands.kvstore.bucket import clip_factor
from allhands.kvstore.chunks import Chunk
from allhands.kvstore.connected import first_rounds
from allhands.kvstore.frames import Kind, pack
from allhands.kvstore.key_rounds import KeyRounds
from allhands.kvstore.members import Members
from allhands.kvstore.served import ServedStore
from allhands.kvstore.store import Share, Step
from tests.kvstore.serving import Job, job

pytestmark = pytest.mark.timeout(60)

LEASE = 2.5  # a worker gives a sign of life every second
SIZES = {"a": 1000, "b": 80_000}  # on two servers, in several chunks
WEIGHTS = (1.0, 5.0, 3.0)
LOST_AT = 2
STEPS = 5
Values = dict[str, torch.Tensor]


def _first() -> Values:
    return {name: torch.arange(count, dtype=torch.float32) for name, count in SIZES.items()}


def _grads(rank: int, step: int) -> Values:
    return {name: torch.arange(count) % 7 + float((rank + 1) * (step + 1)) for name, count in SIZES.items()}


def _reference(took_part: list[set[int]], clip: float | None = None) -> Values:
    """SGD with rate 0.5, by hand; who was in each step."""
    weights = _first()
    for step, ranks in enumerate(took_part):
        total = {name: torch.zeros(count) for name, count in SIZES.items()}
        for rank in sorted(ranks):
            for name, grad in _grads(rank, step).items():
                total[name] += grad
        factor = 1.0 / sum(WEIGHTS[rank] for rank in ranks)
        for value in total.values():
            value.mul_(factor)
        if clip is not None:
            squares = sum(float(value.double().square().sum()) for value in total.values())
            for value in total.values():
                value.mul_(clip_factor(squares, clip))
        for name, value in total.items():
            weights[name] -= 0.5 * value
    return weights


def _joined(made: Job, rank: int, **options: Any) -> ServedStore:
    store = made.store(rank, **{"on_worker_loss": "continue", **options})
    store.set_optimizer("sgd", {"lr": 0.5})
    store.declare(_first(), complete=True)
    return store


def _update(store: ServedStore, outs: Values, step: int, clip: float | None = None) -> Step:
    return store.update(_grads(store.rank, step), outs, Share(WEIGHTS[store.rank], 1.0), clip_norm=clip)


def _crash(store: ServedStore) -> None:
    """What the servers see when its process is killed."""
    store._closed = True
    for link in store.links:
        link._closing = True
        for side in (link._up, link._down):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


def _lost(store: ServedStore, how: str, clip: float | None) -> None:
    """Be lost in the middle of step LOST_AT."""
    grads, share = _grads(store.rank, LOST_AT), Share(WEIGHTS[store.rank], 1.0)
    if how in ("mid-chunk", "between chunks"):
        _, meta, involved = store._begin(list(grads), share, None, clip)
        store._settle()
        for link in involved:
            here = [piece for piece in store._pieces["b"] if piece.server == link.number]
            assert len(here) > 1
            values = grads["b"][here[0].start : here[0].stop].numpy().tobytes()
            sent = values if how == "between chunks" else values[: len(values) // 2]
            link._up.sendall(pack(Kind.PUSH, 0, here[0].number, meta, LOST_AT + 1, len(values)) + sent)
        if how == "between chunks":
            store._settle()
    elif how == "after push":
        store._send(grads, None, share, None, clip)
        store._settle()
    elif how == "clipped":  # all have pushed, and nobody has told the servers by how much to multiply

        def norm(*_: Any) -> None:
            while not all(link.squares for link in store.links):
                time.sleep(0.01)
            _crash(store)
            raise ConnectionAbortedError

        store._clip = norm  # type: ignore[method-assign]
        with contextlib.suppress(ConnectionAbortedError):
            _update(store, _first(), LOST_AT, clip)
        return
    if how == "hung":
        _no_beats(store)
    else:
        _crash(store)


def _no_beats(store: ServedStore) -> None:
    beat = pack(Kind.BEAT)
    for link in store.links:
        queue = link.first
        link.first = lambda *parts, queue=queue: None if parts == (beat,) else queue(*parts)  # type: ignore[method-assign]


@pytest.mark.parametrize("transport", ["tcp", "shared"])
@pytest.mark.parametrize("how", ["before push", "mid-chunk", "between chunks", "after push", "clipped", "hung", "two at once"])
def test_the_others_finish_the_step_without_the_lost_worker(how: str, transport: str) -> None:
    clip = 0.25 if how in ("clipped", "before push") else None
    lost = {1, 2} if how == "two at once" else {1}
    longest = [0.0]
    with job(3, 2, LEASE) as made:
        gone = threading.Barrier(3)

        def work(rank: int) -> Any:
            store, outs, workers = _joined(made, rank, transport=transport), _first(), []
            for step in range(STEPS):
                if step == LOST_AT:
                    gone.wait(20.0)
                    if rank in lost:
                        _lost(store, how, clip)
                        return store
                began = time.monotonic()
                workers.append(_update(store, outs, step, clip).workers)
                if step == LOST_AT:
                    longest[0] = max(longest[0], time.monotonic() - began)
            return outs, workers

        results = made.run(work)
        assert longest[0] < LEASE + 1.0
        counted = {0, 1, 2} if how in ("after push", "clipped") else {0, 1, 2} - lost
        took_part = [{0, 1, 2}] * LOST_AT + [counted] + [{0, 1, 2} - lost] * (STEPS - LOST_AT - 1)
        expected = _reference(took_part, clip)
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
                WorldError, match=r"go on without this worker: worker 1 \(host .*, process \d+\) is lost: no sign"
            ):
                _update(results[1], _first(), LOST_AT)


def test_a_barrier_opens_when_the_one_that_is_missing_is_lost() -> None:
    with job(3, 2, LEASE) as made:

        def work(rank: int) -> float:
            store = _joined(made, rank)
            store.barrier()
            if rank == 1:
                time.sleep(0.3)
                _crash(store)
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
            store, outs = _joined(made, rank, on_worker_loss="stop"), _first()
            for step in range(LOST_AT):
                _update(store, outs, step)
            gone.wait(20.0)
            if rank == 1:
                _lost(store, how, None)
                return []
            told, began = [], time.monotonic()
            for _ in range(2):  # the second call has the reason too
                with pytest.raises(WorldError) as raised:
                    _update(store, outs, LOST_AT)
                told.append(str(raised.value))
            assert time.monotonic() - began < LEASE + 1.0
            return told

        for told in (found := made.run(work))[0], found[2]:
            for text in told:
                assert f"worker 1 (host {socket.gethostname()}, process " in text
                assert f"is lost: {why}" in text


def test_the_error_after_a_loss_names_the_step_and_the_keys_that_were_waited_for() -> None:
    with job(3, 2, LEASE) as made:

        def work(rank: int) -> str:
            store, outs = _joined(made, rank, on_worker_loss="stop"), _first()
            for step in range(LOST_AT):
                _update(store, outs, step)
            if rank == 1:
                chunks = [chunk for server in made.servers for chunk in server.shards[0].chunks.values()]
                while not all(len(chunk.added) + len(chunk.arrived) == 2 and chunk.version == LOST_AT for chunk in chunks):
                    time.sleep(0.01)
                _crash(store)
                return ""
            with pytest.raises(WorldError) as raised:
                _update(store, outs, LOST_AT)
            return str(raised.value)

        found = made.run(work)
    for rank in (0, 2):
        assert found[rank].startswith("worker 1 (host ")
        waited = f"; worker {rank} waits for the other workers' gradients in step {LOST_AT + 1}, for 'a', 'b' of server 0, 1"
        assert found[rank].endswith(waited)


@pytest.mark.parametrize("transport", ["tcp", "shared"])
@pytest.mark.parametrize("rank_lost", [0, 1])
def test_a_worker_that_was_started_again_joins_from_a_round_on(rank_lost: int, transport: str) -> None:
    end, wait_at = 12, 6
    with job(3, 2, LEASE) as made:
        back = threading.Event()

        def work(rank: int) -> Any:
            store, outs, step, numbers = _joined(made, rank, transport=transport), _first(), 0, []
            while step < end:
                if step == LOST_AT and rank == rank_lost and store in made.stores[:3]:
                    _crash(store)
                    while min(chunk.version for chunk in made.servers[0].shards[0].chunks.values()) < wait_at - 1:
                        time.sleep(0.01)
                    store = _joined(made, rank, life="two", transport=transport)
                    back.set()
                    for name, out in outs.items():
                        store.pull(name, out)
                    step = store._version()
                    continue
                if step == wait_at and rank != rank_lost:
                    assert back.wait(20.0)
                taken = _update(store, outs, step)
                numbers.append((taken.number, taken.workers))
                step += 1
            return outs, numbers

        results = made.run(work)
        others = {0, 1, 2} - {rank_lost}
        numbers = results[min(others)][1]
        assert [number for number, _ in numbers] == list(range(1, end + 1))
        counts = [workers for _, workers in numbers]
        joined = LOST_AT + counts[LOST_AT:].index(3)
        assert wait_at <= joined <= wait_at + 1
        assert counts == [3] * LOST_AT + [2] * (joined - LOST_AT) + [3] * (end - joined)
        assert results[rank_lost][1] == [one for one in numbers if one[0] <= LOST_AT or one[0] > joined]
        expected = _reference([{0, 1, 2} if count == 3 else others for count in counts])
        for outs, _ in results:
            for name, value in expected.items():
                assert torch.equal(outs[name], value)


def test_worker_0_that_was_lost_before_it_gave_the_values_gives_them_when_it_comes_again() -> None:
    with job(2, 2, LEASE) as made:

        def work(rank: int) -> Values:
            if rank == 0:
                _crash(made.store(0, on_worker_loss="continue"))
                time.sleep(0.3)
            store, outs = _joined(made, rank, life="two" if rank == 0 else "one"), _first()
            for name, out in outs.items():
                out.zero_()
                if rank == 1:  # what a first update would bring, without one of this worker
                    store.pull(name, out)
            return outs

        for name, value in made.run(work)[1].items():
            assert torch.equal(value, _first()[name])


@pytest.mark.parametrize("rule", ["stop", "continue"])
def test_a_worker_that_closes_in_mid_training_is_no_loss(rule: str) -> None:
    with job(3, 2, LEASE) as made:

        def work(rank: int) -> Values:
            store, outs = _joined(made, rank, on_worker_loss=rule), _first()
            for step in range(STEPS if rank != 1 else LOST_AT):
                _update(store, outs, step)
            store.close()
            return outs

        expected = _reference([{0, 1, 2}] * LOST_AT + [{0, 2}] * (STEPS - LOST_AT))
        results = made.run(work)
        for rank in (0, 2):
            for name, value in expected.items():
                assert torch.equal(results[rank][name], value)


def test_keys_that_are_declared_one_by_one_are_joined_one_by_one() -> None:
    """The rounds of a key do not wait for a worker that came again and has not come to this key yet."""
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
            _crash(store)
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

        assert made.run(work)[1] == ("worker 0 has left or is lost, and has not given the first values of 'a'; start again")


def test_worker_0_that_is_lost_for_good_before_it_gave_the_values_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLHANDS_ON_WORKER_FAILURE", "continue")
    with job(2, 1, LEASE) as made:

        def work(rank: int) -> str:
            if rank == 0:
                _crash(made.store(0))
                return ""
            with pytest.raises(WorldError) as raised:
                made.store(1).init("a", torch.zeros(2))
            return str(raised.value)

        assert made.run(work)[1] == "worker 0 has left or is lost, and has not given the first values of 'a'; start again"


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
            store, outs, counts = _joined(made, rank), _first(), []
            if rank == 1:
                assert store._again
                return None
            for step in range(LOST_AT):
                counts.append(_update(store, outs, step).workers)
            alone.set()
            return outs, counts

        results = made.run(work)
        for rank in (0, 2):
            outs, counts = results[rank]
            assert counts == [2] * LOST_AT
            for name, value in _reference([{0, 2}] * LOST_AT).items():
                assert torch.equal(outs[name], value)


@pytest.mark.parametrize(("rule", "absent"), [("stop", 1), ("continue", 0)])
def test_a_worker_that_never_comes_is_named_where_the_others_cannot_go_on(rule: str, absent: int) -> None:
    with job(2, 1, LEASE) as made:
        made.servers[0].patience = 0.5

        def work(rank: int) -> str:
            if rank == absent:
                return ""
            with pytest.raises(WorldError) as raised:
                store = _joined(made, rank, on_worker_loss=rule)
                _update(store, _first(), 0)
            return str(raised.value)

        text = made.run(work)[1 - absent]
    if rule == "stop":
        assert text.startswith("worker 1 is lost: it has not connected to server 0 within 0 s of the first worker (")
        assert (
            "ALLHANDS_KVSTORE_START sets how long is waited); worker 0 waits for the other workers' gradients in step 1" in text
        )
    else:
        assert text == "worker 0 has left or is lost, and has not given the first values of 'a', 'b'; start again"


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
    assert [rounds.arrive(chunks[number], 1, workers[rank]) for rank, number in [(0, 0), (1, 0), (0, 1), (2, 1)]] == [
        False, False, True, False,
    ]  # fmt: skip
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
