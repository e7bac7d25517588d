"""Tables of rows on servers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from allhands.errors import UserError
from allhands.kvstore import RowSparse, Share
from allhands.kvstore.row_table import first_rows
from allhands.kvstore.served import ServedStore
from tests.kvstore.serving import error_of, job

COLUMNS = 3


def sparse(table: RowSparse, ids: list[int], rows: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([ids], dtype=torch.int64),
        rows,
        (table.rows, table.columns),
        check_invariants=True,
    )


def pushes(step: int, rank: int) -> tuple[list[int], torch.Tensor]:
    """Some ids of 20, with repetitions; none for worker 1 in step 2."""
    generator = torch.Generator().manual_seed(step * 10 + rank)
    count = 0 if (step, rank) == (2, 1) else 12
    return torch.randint(0, 20, (count,), generator=generator).tolist(), torch.randn(
        count, COLUMNS, generator=generator
    )


@pytest.mark.parametrize(
    ("name", "options", "dense"),
    [
        ("sgd", {"lr": 0.1}, lambda params: torch.optim.SGD(params, lr=0.1)),
        ("adagrad", {"lr": 0.1}, lambda params: torch.optim.Adagrad(params, lr=0.1)),
    ],
)
def test_rows_are_those_of_a_dense_tensor(name: str, options: dict[str, float], dense: Any) -> None:
    """Rows that nobody pushes do not move with these optimizers, so that a dense tensor is the
    reference."""
    table = RowSparse(20, COLUMNS, std=0.5, seed=4)
    weights = torch.nn.Parameter(first_rows(table, torch.arange(20)))
    optimizer = dense([weights])
    for step in range(6):
        grad = torch.zeros(20, COLUMNS)
        for rank in range(2):
            ids, rows = pushes(step, rank)
            grad.index_add_(0, torch.tensor(ids, dtype=torch.int64), rows)
        weights.grad = grad / 5  # weights 2 and 3
        if step >= 4:
            optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()

    def work(rank: int) -> list[torch.Tensor]:
        store = made.store(rank)
        store.set_optimizer(name, options)
        store.init("table", table)
        everything = torch.arange(20)
        found = [store.row_sparse_pull("table", row_ids=everything)]
        for step in range(6):
            grad = sparse(table, *pushes(step, rank))
            if step < 4:
                store.push("table", grad, weight=2 + rank)
                store.row_sparse_pull("table", row_ids=everything)
            else:
                taken = store.update({"table": grad}, {}, Share(2 + rank, 1.0), [{"lr": 0.01}])
                assert taken.workers == 2
        found.append(store.row_sparse_pull("table", row_ids=everything.flip(0)).flip(0))
        return found

    with job(2, servers=3) as made:
        worlds = made.run(work)
    for first, last in worlds:
        assert torch.equal(first, first_rows(table, torch.arange(20)))
        assert float((last - weights.detach()).abs().max()) <= 1e-6
    assert torch.equal(worlds[0][1], worlds[1][1])


def test_large_ids_duplicates_and_nothing_at_all() -> None:
    table = RowSparse(2**40, COLUMNS, std=0.1, seed=2)
    ids = [2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 5, 59_999_999, 60_000_000, 2**40 - 1, 0]

    def work(rank: int) -> dict[str, Any]:
        store = made.store(rank)
        store.init("table", table)
        store.set_optimizer("sgd", lr=1.0)
        asked = torch.tensor(ids)
        found: dict[str, Any] = {"first": store.row_sparse_pull("table", row_ids=asked)}
        own = ids if rank == 0 else [ids[3], ids[3], ids[-1]]
        store.push("table", sparse(table, own, torch.ones(len(own), COLUMNS)))
        out = torch.empty(len(ids), COLUMNS)
        store.row_sparse_pull("table", out, row_ids=asked)
        found["moved"] = found["first"] - out
        found["repeated"] = store.row_sparse_pull(
            "table", row_ids=torch.tensor([ids[3], 7, ids[3]])
        )
        store.push("table", sparse(table, [], torch.empty(0, COLUMNS)))
        found["nothing"] = store.row_sparse_pull("table", row_ids=torch.empty(0, dtype=torch.int64))
        state = store.state().tensors["table"]
        found["ids"], found["steps"] = state["ids"].tolist(), state["step"].tolist()
        return found

    with job(2, servers=2) as made:
        worlds = made.run(work)
        held = sum(
            len(part.rows) for server in made.servers for part in server.shards[0].parts.values()
        )
    assert held == len(ids)  # of 2**40 rows, those that were pushed
    for found in worlds:
        assert torch.equal(found["first"], first_rows(table, torch.tensor(ids)))
        expected = [1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 2.0]
        assert torch.allclose(
            found["moved"], torch.tensor(expected)[:, None].expand(-1, COLUMNS), atol=1e-6
        )
        assert torch.equal(found["repeated"][0], found["repeated"][2])
        assert torch.equal(found["repeated"][1], first_rows(table, torch.tensor([7]))[0])
        assert found["nothing"].shape == (0, COLUMNS)
        assert found["ids"] == sorted(ids)
        assert found["steps"] == [1] * len(ids)


def test_without_an_optimizer_rows_are_added_up_and_assigned() -> None:
    table = RowSparse(60_000_000, COLUMNS)

    def work(rank: int) -> list[float]:
        store = made.store(rank)
        store.init(["table", "w"], [table, torch.zeros(2)])
        grad = sparse(table, [5, 50_000_000 + rank], torch.full((2, COLUMNS), 1.0 + rank))
        store.push("table", grad)
        rows = store.row_sparse_pull("table", row_ids=torch.tensor([5, 50_000_000, 50_000_001, 6]))
        assert store.pull(["table", "w"])[0].tolist() == [
            0.0,
            0.0,
        ]  # rows are left out, as MXNet does
        return rows[:, 0].tolist()

    with job(2, servers=2) as made:
        assert made.run(work) == [[3.0, 1.0, 2.0, 0.0]] * 2


def test_a_table_begins_with_given_rows() -> None:
    def work(rank: int) -> list[float]:
        store = made.store(rank)
        rows = torch.full((2, COLUMNS), 1.0 + rank)  # those of worker 0 are taken
        store.init("table", sparse(RowSparse(9, COLUMNS), [7, 2], rows))
        store.set_optimizer("sgd", learning_rate=1.0)
        store.push("table", sparse(RowSparse(9, COLUMNS), [7], torch.ones(1, COLUMNS)))
        return store.row_sparse_pull("table", row_ids=torch.tensor([2, 7, 0]))[:, 0].tolist()

    with job(2, servers=2) as made:
        assert made.run(work) == [[1.0, -1.0, 0.0]] * 2


def test_async_and_bounded_rows() -> None:
    table = RowSparse(100, 1)

    def one(store: ServedStore, steps: int) -> float:
        store.set_optimizer("sgd", lr=1.0)
        store.init("table", table)
        for _ in range(steps):
            store.push("table", sparse(table, [7, 8], torch.ones(2, 1)))
            store.row_sparse_pull("table", row_ids=torch.tensor([7]))
        store.barrier()
        return float(store.row_sparse_pull("table", row_ids=torch.tensor([8])))

    def work(rank: int) -> list[float]:
        steps = 3 + rank
        return [
            one(made.store(rank, "dist_async", 0), steps),
            one(made.store(rank, "dist_ssp", 1, staleness=1), steps),
        ]

    with job(2, servers=2) as made:
        assert made.run(work) == [[-7.0, -7.0]] * 2


def test_a_read_of_rows_waits_for_the_slow_one_where_staleness_is_bounded() -> None:
    table, read = RowSparse(100, 1), threading.Event()
    events: list[str] = []

    def work(rank: int) -> None:
        store = made.store(rank, "dist_ssp", staleness=1)
        store.set_optimizer("sgd", lr=1.0)
        store.init("table", table)
        if rank == 1:
            read.wait(10)
            time.sleep(0.1)
            events.append("1 leaves")
            store.close()
            return
        for number in range(2):
            store.push("table", sparse(table, [3], torch.ones(1, 1)))
            store.row_sparse_pull("table", row_ids=torch.tensor([3]))
            events.append(f"0 read {number + 1}")
            read.set()

    with job(2) as made:
        made.run(work)
    assert events == ["0 read 1", "1 leaves", "0 read 2"]


def test_errors_name_the_key_and_the_servers_go_on() -> None:
    table = RowSparse(2**33, COLUMNS)

    def work(rank: int) -> dict[str, str]:
        store = made.store(rank)
        store.init(["table", "w"], [table, torch.zeros(2)])
        store.set_optimizer("adam", lr=0.1)
        found = {}
        if rank == 1:
            found["dense"] = error_of(lambda: store.push("table", torch.ones(4, COLUMNS)))
            other = RowSparse(2**33, COLUMNS + 1)
            found["columns"] = error_of(
                lambda: store.push("table", sparse(other, [1], torch.ones(1, COLUMNS + 1)))
            )
            found["dtype"] = error_of(
                lambda: store.push("table", sparse(table, [1], torch.ones(1, COLUMNS).double()))
            )
            found["range"] = error_of(
                lambda: store.row_sparse_pull("table", row_ids=torch.tensor([2**33]))
            )
            found["negative"] = error_of(
                lambda: store.row_sparse_pull("table", row_ids=torch.tensor([-1]))
            )
            found["floats"] = error_of(
                lambda: store.row_sparse_pull("table", row_ids=torch.tensor([1.0]))
            )
            found["no ids"] = error_of(lambda: store.row_sparse_pull("table"))
            found["out"] = error_of(
                lambda: store.row_sparse_pull(
                    "table", torch.empty(2, COLUMNS), row_ids=torch.tensor([1])
                )
            )
            found["pull"] = error_of(lambda: store.pull("table", ignore_sparse=False))
            found["again"] = error_of(lambda: store.init("table", table))
            found["another table"] = error_of(
                lambda: store.declare({"table": RowSparse(5, COLUMNS)})
            )
        store.push("table", sparse(table, [1], torch.ones(1, COLUMNS)))
        if rank == 1:
            found["twice"] = error_of(
                lambda: store.push("table", sparse(table, [1], torch.ones(1, COLUMNS)))
            )
        rows = store.row_sparse_pull("table", row_ids=torch.tensor([1]))
        assert torch.allclose(rows, torch.full((1, COLUMNS), -0.1))
        return found

    with job(2, servers=2) as made:
        found = made.run(work)[1]
    assert "'table' holds rows; push a sparse tensor of them" in found["dense"]
    for name in ("columns", "dtype"):
        assert "the value for 'table' has shape" in found[name], name
    assert "row ids for 'table' go from 8589934592 to 8589934592" in found["range"]
    assert "row ids for 'table' go from -1" in found["negative"]
    assert "must be int64 (floats lose ids beyond 2**24)" in found["floats"]
    assert "row_sparse_pull('table') needs row_ids" in found["no ids"]
    assert "row_sparse_pull('table'): out has shape [2, 3]" in found["out"]
    assert "'table' holds rows; read them with row_sparse_pull" in found["pull"]
    assert "the key 'table' was initialised already" in found["again"]
    assert (
        "the key 'table' is a table of 5 rows of 3 float32 on worker 1, but a table of 8589934592"
        in found["another table"]
    )
    assert (
        found["twice"]
        == "the key 'table' was pushed already and not pulled since; pull it before the next push"
    )


def test_a_step_without_samples_anywhere_is_told_to_all() -> None:
    table = RowSparse(10, 1)

    def work(rank: int) -> str:
        store = made.store(rank)
        store.init("table", table)
        store.set_optimizer("sgd", lr=1.0)
        with pytest.raises(UserError) as raised:
            store.update({"table": sparse(table, [1], torch.ones(1, 1))}, {}, Share(0, 1.0))
        return str(raised.value)

    with job(2) as made:
        for text in made.run(work):
            assert text.startswith("the key 'table': no worker has a sample in this step")


@pytest.mark.parametrize("loss", ["stop", "continue"])
def test_rows_that_came_before_their_round_was_open_count_when_their_worker_leaves(
    loss: str,
) -> None:
    table, ids = RowSparse(10, 1), [2, 3]
    held, left = threading.Event(), threading.Event()

    def work(rank: int) -> list[list[float]] | None:
        store = made.store(rank, on_worker_loss=loss)
        store.set_optimizer("sgd", lr=1.0)
        store.init("table", table)
        if rank == 1:  # what it sends to server 1 comes late
            store.links[1].put(held.wait)
        for step in range(2):
            if rank == 1 and step == 1:
                assert left.wait(20.0)
                held.set()
            store.push("table", sparse(table, ids, torch.full((2, 1), 1.0 + rank + 10 * step)))
            if step == 0:
                store.row_sparse_pull("table", row_ids=torch.tensor([2]))  # of server 0
        if rank == 0:
            store.close()
            left.set()
            return None
        return store.row_sparse_pull("table", row_ids=torch.tensor(ids)).tolist()

    with job(2, servers=2) as made:
        assert made.run(work)[1] == [[-26.0], [-26.0]]  # 1 + 2 + 11 + 12 on both servers


def test_a_worker_that_came_again_is_told_the_rounds_of_rows() -> None:
    """Two tables, one pushed seldom; the other's rows lie on both servers and on one alone."""
    table, lost_at, end = RowSparse(100, 1), 3, 12
    asked = torch.tensor([2, 3])

    def begun(rank: int, life: str) -> ServedStore:
        store = made.store(rank, on_worker_loss="continue", life=life)
        store.set_optimizer("sgd", lr=1.0)
        store.init(["often", "seldom"], [table, table])
        return store

    def push(store: ServedStore, name: str) -> None:
        store.push(name, sparse(table, [2, 3, 3], torch.full((3, 1), 1.0 + store.rank)))

    def work(rank: int) -> list[list[float]]:
        store, again = begun(rank, "one"), False
        push(store, "seldom")
        store.row_sparse_pull("seldom", row_ids=asked)
        step = 0
        while step < end:
            if rank == 1 and step == lost_at and not again:
                again = True
                for link in store.links:
                    link._closing = True
                    link._shut_down()
                store._closed = True
                assert gone.wait(20.0)
                store = begun(1, "two")
                back.set()
                store.row_sparse_pull("often", row_ids=asked[:1])  # of one server only
                step = store._version_of("often")
            if rank == 0 and step == lost_at + 3:
                gone.set()
                assert back.wait(20.0)
            push(store, "often")
            rows = store.row_sparse_pull("often", row_ids=asked)
            seen[rank].append((step, rows.view(-1).tolist()))
            step += 1
        return [
            store.row_sparse_pull(name, row_ids=asked).view(-1).tolist()
            for name in ("often", "seldom")
        ]

    seen: list[list[Any]] = [[], []]
    gone, back = threading.Event(), threading.Event()
    with job(2, servers=2) as made:
        zero, one = made.run(work)
    both = len(seen[1])
    assert [step for step, _ in seen[0]] == list(range(end))
    assert lost_at < both <= end - 3
    assert set(map(str, seen[1])) <= set(map(str, seen[0]))
    total = float(3 * both + (end - both))
    assert zero == one == [[-total, -2 * total], [-3.0, -6.0]]
