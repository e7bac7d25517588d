"""Workers that wait for one another for ever are told so; those that wait for a slow one are
not."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest
import torch

from allhands.kvstore import RowSparse, Share, wait_state
from allhands.kvstore.served import ServedStore
from allhands.kvstore.waits import Waits
from tests.kvstore.serving import error_of, job

pytestmark = pytest.mark.serial

ORDERS = (("a", "b"), ("b", "a"))
LINE = r"\(\S*test_waits.py:\d+ in \S+\)"


def pushpull(store: ServedStore, key: str) -> None:
    store.pushpull(key, torch.ones(2))


def push_and_pull(store: ServedStore, key: str) -> None:
    store.push(key, torch.ones(2))
    store.pull(key)


def reduce(store: ServedStore, key: str) -> None:
    store.reduce({key: torch.ones(2)}, Share())


def update(store: ServedStore, key: str) -> None:
    store.update({key: torch.ones(2)}, {}, Share())


def clipped(store: ServedStore, key: str) -> None:
    store.update({key: torch.ones(2)}, {}, Share(), clip_norm=1.0)


def row_sparse_pull(store: ServedStore, key: str) -> None:
    store.push(
        key,
        torch.sparse_coo_tensor(
            torch.tensor([[0, 1]]), torch.ones(2, 1), (4, 1), check_invariants=True
        ),
    )
    store.row_sparse_pull(key, row_ids=torch.tensor([0, 1]))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("exchange", "call"),
    [
        (pushpull, "pushpull"),
        (push_and_pull, "pull"),
        (reduce, "reduce"),
        (update, "update"),
        (clipped, "update"),
        (row_sparse_pull, "row_sparse_pull"),
    ],
)
def test_keys_that_are_exchanged_in_another_order_are_an_error_on_all(
    exchange: Callable[[ServedStore, str], None],
    call: str,
    servers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wait_state, "REPORT_AFTER", 0.2)

    def work(rank: int) -> str:
        store = made.store(rank)
        first = RowSparse(4, 1) if exchange is row_sparse_pull else torch.zeros(2)
        store.init(["a", "b"], [first, first])
        if exchange in (update, clipped):
            store.set_optimizer("sgd", lr=1.0)
        return error_of(lambda: [exchange(store, key) for key in ORDERS[rank]])

    with job(2, servers) as made:
        found = made.run(work)
    for text in found:
        assert re.fullmatch(
            f"the workers wait for one another for ever: worker 0 is in {call} {LINE} and waits "
            "until worker 1 pushes 'a'; "
            f"worker 1 is in {call} {LINE} and waits until worker 0 pushes 'b'; exchange keys in "
            "the same order on all workers, "
            r"or push all of them before the first is pulled: push\(\['a', 'b'\], …\), then "
            r"pull\(\['a', 'b'\], …\)",
            text,
        ), text


def test_lists_in_another_order_and_all_pushes_before_the_first_pull_are_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wait_state, "REPORT_AFTER", 0.2)

    def work(rank: int) -> list[list[float]]:
        store = made.store(rank)
        store.init(["a", "b"], [torch.zeros(2)] * 2)
        keys = list(ORDERS[rank])
        store.pushpull(keys, [torch.ones(2), torch.ones(2)])
        for key in keys:
            store.push(key, torch.full((2,), 2.0))
        return [store.pull(key).tolist() for key in keys]

    with job(2, 2) as made:
        assert made.run(work) == [[[4.0, 4.0]] * 2] * 2


def test_a_circle_of_three_is_found_and_one_that_does_not_wait_is_told_at_its_next_call() -> None:
    def work(rank: int) -> str:
        store = made.store(rank)
        store.init(["a", "b", "c"], [torch.zeros(2)] * 3)
        for key in ("ab", "bc", "ca", "abc")[rank]:
            store.push(key, torch.ones(2))
        if rank < 3:
            return error_of(lambda: store.pull("abc"[rank]))
        stuck.wait(30.0)
        return error_of(lambda: store.pull("a"))

    stuck = threading.Event()
    with pytest.MonkeyPatch.context() as patch, job(4) as made:
        patch.setattr(wait_state, "REPORT_AFTER", 0.2)
        found_circle = Waits.add

        def add(self: Waits, *args: object) -> str | None:
            text = found_circle(self, *args)  # type: ignore[arg-type]
            if text:
                stuck.set()
            return text

        patch.setattr(Waits, "add", add)
        found = made.run(work)
    assert len(set(found)) == 1
    waited = re.findall(
        r"worker (\d) is in pull \S* in \S* and waits until worker (\d) pushes '(\w)'", found[0]
    )
    assert waited == [("0", "1", "a"), ("1", "2", "b"), ("2", "0", "c")]


def test_workers_that_wait_for_a_slow_one_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_state, "REPORT_AFTER", 0.2)

    def work(rank: int) -> list[float]:
        store = made.store(rank)
        store.init(["a", "b", "c"], [torch.zeros(2)] * 3)
        sums = []
        # Each one is the slow one once, after it has waited for long itself.
        for number, key in enumerate("abc"):
            if rank == number:
                time.sleep(2.5)
            pushpull(store, key)
            sums.append(store.pull(key).sum().item())
        store.barrier()
        return sums

    with job(3, 2) as made:
        assert made.run(work) == [[6.0] * 3] * 3
        assert len(made.servers[0].shards[0]._waits._waits) == 3  # all had reported


def test_a_worker_whose_other_thread_pushes_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wait_state, "REPORT_AFTER", 0.2)

    def work(rank: int) -> float:
        store = made.store(rank)
        store.init(["a", "b", "c"], [torch.zeros(2)] * 3)
        if rank == 1:
            pushpull(store, "b")
            pushpull(store, "a")
            return store.pull("b").sum().item()
        pushed = threading.Event()

        def other() -> None:
            store.push("c", torch.ones(2))
            pushed.set()
            time.sleep(2.5)
            store.push("b", torch.ones(2))

        thread = threading.Thread(target=other)
        thread.start()
        pushed.wait(10.0)
        pushpull(store, "a")
        thread.join()
        return store.pull("b").sum().item()

    with job(2) as made:
        assert made.run(work) == [4.0, 4.0]


def test_a_barrier_that_one_calls_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_state, "REPORT_AFTER", 0.2)

    def work(rank: int) -> str:
        store = made.store(rank)
        store.init("a", torch.zeros(2))
        store.barrier()
        return error_of(lambda: store.barrier() if rank == 0 else pushpull(store, "a"))

    with job(2) as made:
        found = made.run(work)
    for text in found:
        assert re.fullmatch(
            f"the workers wait for one another for ever: worker 0 is in barrier {LINE} and waits "
            f"until worker 1 calls barrier too; worker 1 is in pushpull {LINE} and waits until "
            "worker 0 pushes 'a'; make the same calls in the same order on all workers",
            text,
        ), text


def test_keys_that_are_made_in_another_order_between_exchanges_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wait_state, "REPORT_AFTER", 0.2)

    def work(rank: int) -> str:
        store = made.store(rank)

        def exchange() -> None:
            for key in ORDERS[rank]:
                store.init(key, torch.zeros(2))
                pushpull(store, key)

        return error_of(exchange)

    with job(2) as made:
        found = made.run(work)
    for text in found:
        assert re.search(
            f"worker 0 is in pushpull {LINE} and waits until worker 1 pushes 'a'; ", text
        ), text
        assert re.search(
            f"worker 1 is in init {LINE} and waits until worker 0 makes 'b'; make the same calls",
            text,
        ), text


def test_one_that_came_again_is_not_waited_for_in_keys_that_it_has_not_joined() -> None:
    def said(key: str, pushed: dict[str, int], again: bool) -> dict[str, object]:
        return {
            "call": "pull",
            "line": "x.py:1",
            "needs": [["push", key, 2]],
            "reached": {"push": pushed},
            "again": again,
        }

    waits = Waits()
    assert waits.add(0, said("a", {"a": 2, "b": 1}, False)) is None
    assert waits.add(1, said("b", {"b": 2}, True)) is None
    assert waits.add(1, said("b", {"b": 2}, False))
    waits.remove(0)
    assert waits.add(1, said("b", {"b": 2}, False)) is None
