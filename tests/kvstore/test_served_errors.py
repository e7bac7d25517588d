"""Bad input to a store on servers, pushes that come twice, and what is left when all is done."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from allhands.errors import AllhandsError
from allhands.kvstore import Share, Trainer
from allhands.kvstore.chunks import Chunk
from allhands.kvstore.parameter_server import ParameterServer
from allhands.kvstore.parts import Meta
from allhands.kvstore.shard import Shard
from tests.kvstore.serving import error_of, job


def test_bad_input_is_an_error_on_that_worker_and_the_store_goes_on() -> None:
    def work(rank: int) -> dict[str, str]:
        store = made.store(rank)
        store.init("w", torch.zeros(4))
        store.set_optimizer("sgd", lr=1.0)
        found = {}
        if rank == 1:
            store.push("w", torch.ones(4))
            found["twice"] = error_of(lambda: store.push("w", torch.ones(4)))
            found["pushpull"] = error_of(lambda: store.pushpull("w", torch.ones(4)))
            found["update"] = error_of(lambda: store.update({"w": torch.ones(4)}, {}, Share()))
            store.pull("w")
            found["shape"] = error_of(lambda: store.push("w", torch.ones(5)))
            found["dtype"] = error_of(lambda: store.push("w", torch.ones(4, dtype=torch.float64)))
            found["gradient"] = error_of(lambda: store.update({"w": torch.ones(5)}, {}, Share()))
            found["out"] = error_of(lambda: store.pull("w", torch.ones(5)))
            found["unknown"] = error_of(lambda: store.push("v", torch.ones(4)))
            found["pull unknown"] = error_of(lambda: store.pull("v"))
            found["sparse"] = error_of(lambda: store.push("w", torch.ones(4).to_sparse()))
            found["again"] = error_of(lambda: store.init("w", torch.zeros(4)))
            found["optimizer"] = error_of(lambda: store.set_optimizer("adamm"))
            found["another optimizer"] = error_of(lambda: store.set_optimizer("sgd", lr=2.0))
            found["declared in another shape"] = error_of(
                lambda: store.declare({"x": torch.zeros(3)})
            )
            found["reduce"] = error_of(lambda: store.reduce({"w": torch.ones(4)}, Share()))
            found["rows"] = error_of(lambda: store.row_sparse_pull("w", row_ids=torch.tensor([0])))
            found["complex"] = error_of(
                lambda: store.init("z", torch.zeros(2, dtype=torch.complex64))
            )
            found["no compression"] = error_of(lambda: store.load_residuals({}))
            found["nobody"] = error_of(lambda: store.update({}, {}, Share(0)))
        else:
            store.declare({"x": torch.zeros(2)})
            store.push("w", torch.ones(4))
            store.pull("w")
        store.push("w", torch.ones(4))
        assert store.pull("w").tolist() == [-4.0] * 4  # two rounds of both
        store.close()
        found["closed"] = error_of(lambda: store.pull("w"))
        return found

    with job(2, servers=2) as made:
        found = made.run(work)[1]
        assert not any(part.failure for server in made.servers for part in server.shards.values())
    for name in ("twice", "pushpull", "update"):
        assert (
            found[name]
            == "the key 'w' was pushed already and not pulled since; pull it before the next push"
        )
    for name in ("shape", "dtype", "gradient", "out"):
        assert "the key 'w'" in found[name], name
        assert "was initialised with [4] and torch.float32" in found[name], name
    for name in ("unknown", "pull unknown"):
        assert (
            found[name] == "there is no key 'v' in the store; call init('v', value) first. Keys: w"
        )
    assert "'w' is sparse, but the key is dense" in found["sparse"]
    assert found["again"] == "the key 'w' was initialised already; push to it instead"
    assert "adamm" in found["optimizer"]
    assert "adam" in found["optimizer"]
    assert "is sgd" in found["another optimizer"]
    assert "on another" in found["another optimizer"]
    assert found["declared in another shape"] == (
        "the key 'x' is float32 of shape [3] on worker 1, but float32 of shape [2] on another "
        "worker"
    )
    assert "the store has an optimizer" in found["reduce"]
    assert "'w' is a dense tensor" in found["rows"]
    assert "the value for 'z' is complex64" in found["complex"]
    assert "does not compress" in found["no compression"]
    assert "update without keys" in found["nobody"]
    assert found["closed"] == "this store was closed; create another"


def test_workers_that_train_other_parameters_are_told_which() -> None:
    def work(rank: int) -> str:
        store = made.store(rank)
        if rank == 0:
            Trainer(nn.Linear(2, 2, bias=False), "sgd", {"lr": 1.0}, kvstore=store)
            ready.set()
            return ""
        ready.wait(10)
        return error_of(lambda: Trainer(nn.Linear(2, 2), "sgd", {"lr": 1.0}, kvstore=store))

    ready = threading.Event()
    with job(2) as made:
        text = made.run(work)[1]
    assert (
        "worker 1 has the key 'bias', which worker 0 has not: all workers must train the same "
        "parameters" in text
    )


class Told:
    """A worker's session, as chunks see it."""

    occasion = ""

    def __init__(self, rank: int) -> None:
        self.rank, self.steps, self.values = rank, [], []  # type: ignore[var-annotated]

    def tell(self, fields: dict[str, Any]) -> None:
        raise AssertionError(fields)

    def give(self, chunk: Chunk) -> None:
        self.values.append(chunk.weights.clone())

    def finished(self, meta: Meta, workers: int, staleness: int) -> None:
        self.steps.append((meta.step, workers))


def test_a_push_that_comes_again_counts_once() -> None:
    rules = {"wait": "sync", "staleness": 0, "damping": False, "on_worker_loss": "stop"}
    part = Shard(0, 1, 2, rules)
    chunk = Chunk(0, "w", 0, 2, 0, torch.zeros(2))
    part.parts[0] = chunk
    zero, one = Told(0), Told(1)
    released: list[str] = []

    def push(worker: Told, value: float, number: int, step: int) -> None:
        meta = Meta(worker, step, 1.0, None, None, None, 1)
        part.announce(meta)
        part.push(
            chunk,
            number,
            meta,
            torch.full((2,), value),
            lambda: released.append(f"{worker.rank}.{number}"),
            True,
        )

    push(one, 10.0, 1, 1)
    assert "the key 'w' was pushed twice in one round by worker 1" in error_of(
        lambda: push(one, 10.0, 1, 1)
    )
    assert chunk.version == 0
    push(zero, 1.0, 1, 1)
    assert chunk.weights.tolist() == [11.0, 11.0]
    assert chunk.version == 1
    push(one, 10.0, 1, 1)  # after a lost connection, say: it is answered, and not counted
    assert chunk.weights.tolist() == [11.0, 11.0]
    assert chunk.version == 1
    assert not chunk.arrived
    assert "is at version 1; a push for 3 cannot be placed" in error_of(
        lambda: push(zero, 1.0, 3, 3)
    )
    assert [value.tolist() for value in one.values] == [[11.0, 11.0]] * 2
    assert sorted(released) == ["0.1", "0.3", "1.1", "1.1", "1.1"]


def test_a_server_keeps_nothing_of_finished_steps() -> None:
    """Buffers of pushes are used again, and steps that nobody waits for are forgotten."""
    with job(1) as made:
        store = made.store(0, transport="tcp")
        store.set_optimizer("sgd", lr=0.1)
        store.init(["large", "small"], [torch.zeros(5000), torch.zeros(3)])
        grads = {"large": torch.ones(5000), "small": torch.ones(3)}
        for step in range(30):
            if step % 2:
                store.update(grads, grads, Share())
            else:
                store.push(["small", "large"], [grads["small"], grads["large"]])
                store.pull(["large", "small"])
        store.barrier()
        (session,) = made.servers[0].shards[0].members.sessions_now()
        assert {size: len(free) for size, free in session._pool.items() if free} == {
            12: 1,
            20000: 1,
        }
        assert not session._metas
        assert not store.links[0].done
        assert not store.links[0].targets


def test_another_set_of_rules_is_refused() -> None:
    with job(2) as made:
        made.store(0, "dist_sync")
        text = error_of(lambda: made.store(1, "dist_async"))
    assert "create it alike on all" in text


def test_a_server_that_ends_is_an_error_that_names_it() -> None:
    with job(1, servers=2) as made:
        store = made.store(0)
        store.init("w", torch.zeros(2))
        gone: ParameterServer = made.servers[1]
        gone.close()
        with pytest.raises(AllhandsError, match=r"server 1 \(host .*\) is gone"):
            for _ in range(100):
                store.barrier()
                time.sleep(0.02)
