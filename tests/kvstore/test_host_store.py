"""Workers of one host as one member of a store: the same training, one push a host, and what
happens when one is lost."""

from __future__ import annotations

import atexit
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allhands
from allhands.errors import WorldError
from allhands.kvstore import RowSparse, Trainer, create, host_store
from allhands.kvstore.host_group import HostGroup
from allhands.kvstore.host_store import HostStore
from allhands.kvstore.served import ServedStore
from allhands.kvstore.store import KVStore, Share
from allhands.launch import spawn
from allhands.world import World
from tests.kvstore.serving import Job, Weights, error_of, job, same, trained, weights_of
from tests.kvstore.training import OPTIMIZERS, SIZES, by_hand, largest_difference, model, take_steps
from tests.patience import patience

Hosts = Sequence[Sequence[int]]
KIND = "dist_device_sync"


class OnHosts:
    """The stores of a job whose workers lie on these hosts."""

    def __init__(self, made: Job, layout: Hosts, lease: float = 10.0, **rules: Any) -> None:
        self.made, self.lease, self.rules = made, lease, rules
        self.host_of = {rank: host for host in layout for rank in host}
        self.meetings = {tuple(host): dist.HashStore() for host in layout}
        self.groups: dict[int, HostGroup] = {}

    def store(self, rank: int, number: int = 0) -> KVStore:
        own = self.made.store(rank, KIND, number, **self.rules)
        host = self.host_of[rank]
        if len(self.meetings) == self.made.workers:
            return own
        if rank not in self.groups:
            self.groups[rank] = HostGroup(self.meetings[tuple(host)], host, rank, self.lease)
        return HostStore(
            own, self.groups[rank], lambda: self.made.store(rank, KIND, number + 1, **self.rules)
        )

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(rank)` for all ranks at once; what each returned."""
        try:
            return self.made.run(work)
        finally:
            for group in self.groups.values():
                group.close()
                # At exit, one left open would wait for others, which are of this process.
                for store in group.stores:
                    atexit.unregister(store._leave)


def trained_on_hosts(
    made: Job, layout: Hosts, name: str, number: int = 0, **options: Any
) -> list[Weights]:
    """The small training; each worker's weights in the end."""
    where, nets = OnHosts(made, layout), [model(seed=rank) for rank in range(made.workers)]

    def work(rank: int) -> Weights:
        store = where.store(rank, number)
        optimizer, optimizer_params, _ = OPTIMIZERS[name]
        trainer = Trainer(
            nets[rank].named_parameters(), optimizer, optimizer_params, kvstore=store, **options
        )
        take_steps(nets[rank], trainer, store, range(len(SIZES)))
        assert trainer.last_step is not None
        assert trainer.last_step.number == len(SIZES)
        store.close()
        return weights_of(nets[rank])

    return where.run(work)


@pytest.mark.parametrize("layout", [[[0, 1], [2, 3]], [[0, 1, 2], [3]]])
def test_steps_equal_those_of_one_process(layout: Hosts) -> None:
    """With uneven shares; in some steps three of the four workers have no sample."""
    with job(4, 2) as made:
        found = {
            "adam": trained_on_hosts(made, layout, "adam"),
            "momentum": trained_on_hosts(made, layout, "momentum", 1),
            "again": trained_on_hosts(made, layout, "momentum", 2),
            "clipped": trained_on_hosts(made, layout, "momentum", 3, clip_norm=0.5),
            "in the workers": trained_on_hosts(
                made, layout, "momentum", 4, update_on_kvstore=False
            ),
        }
    for name, weights in found.items():
        reference = by_hand(
            "adam" if name == "adam" else "momentum", clip_norm=0.5 if name == "clipped" else None
        )
        assert all(largest_difference(one, reference) <= 1e-6 for one in weights), name
        assert all(same(one, weights[0]) for one in weights), name
    assert same(found["again"][0], found["momentum"][0])


def test_one_host_adds_up_as_the_servers_do() -> None:
    """The order of the sum is the same, so the bits are; and in compression the host's sum is
    rounded once."""
    with job(2) as made:
        plain = trained(made, "adam", "dist_sync")
        on_host = trained_on_hosts(made, [[0, 1]], "adam", 1)
        assert same(on_host[0], plain[0])

    def pushes(
        store: KVStore, values: Sequence[float], weight: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        store.set_optimizer("sgd", {"lr": 1.0})
        weights = {"a": torch.zeros(len(values))}
        store.declare(weights, complete=True)
        for _ in range(3):
            store.update({"a": torch.tensor(values)}, weights, Share(weight, 1.0))
        return weights["a"], store.residuals()

    with job(2) as made:
        where, mine = OnHosts(made, [[0, 1]]), ([0.3, 0.4, -0.2], [0.3, -0.1, -0.9])
        found = where.run(lambda rank: pushes(where.store(rank), mine[rank], 1.0 + rank))
    with job(1) as made:
        weights, residuals = pushes(made.store(0), [a + b for a, b in zip(*mine, strict=True)], 3.0)
    assert found[0][1].keys() == {"a"}
    assert torch.equal(found[0][1]["a"], residuals["a"])
    assert found[1][1] == {}
    for value, _ in found:
        assert torch.equal(value, weights)


def test_only_the_first_worker_of_a_host_sends() -> None:
    with job(4) as made:
        where = OnHosts(made, [[0, 1], [2, 3]])

        def work(rank: int) -> tuple[set[int], int, list[float]]:
            store = where.store(rank)
            store.init(
                ["a", "h"], [torch.full((3,), float(rank)), torch.zeros(2, dtype=torch.bfloat16)]
            )
            given = [torch.full((3,), rank + 1.0), torch.ones(2, dtype=torch.bfloat16)]
            outs = [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)]
            store.pushpull(["a", "h"], given, outs, weight=1.0 + rank)
            store.barrier()
            members = made.servers[0].shards[0].members.everyone()
            step = store.reduce({"a": given[0]}, Share(0.0 if rank == 3 else 1.0, 1.0))
            store.close()
            return members, step.workers, [*outs[0].tolist(), *outs[1].tolist(), *given[0].tolist()]

        for members, workers, values in where.run(work):
            assert members == {0, 2}
            assert workers == 2
            assert (
                values
                == [1.0] * 3 + [pytest.approx(0.4, abs=2e-3)] * 2 + [pytest.approx(10 / 3)] * 3
            )


def test_rows_travel_between_each_worker_and_the_servers() -> None:
    table = RowSparse(rows=5, columns=2)

    def work(rank: int) -> tuple[list[list[float]], list[float], list[int]]:
        store = where.store(rank)
        store.set_optimizer("sgd", {"lr": 1.0})
        store.declare({"users": table, "a": torch.zeros(2)})
        ids = torch.tensor([[rank, 3]])
        gradient = torch.sparse_coo_tensor(
            ids, torch.full((2, 2), rank + 1.0), (5, 2), check_invariants=True
        )
        weights = {"a": torch.zeros(2)}
        store.update(
            {"users": gradient, "a": torch.full((2,), rank + 1.0)}, weights, Share(rank + 1.0, 1.0)
        )
        # Of each worker's own.
        found = store.row_sparse_pull("users", row_ids=torch.tensor([3, rank]))
        state = store.state()
        if rank == 2:
            store.close()
        else:
            store.update({"a": torch.ones(2)}, weights, Share(1.0, 1.0))
        store.close()
        return found.tolist(), weights["a"].tolist(), state.tensors["users"]["ids"].tolist()

    with job(3, 2) as made:
        where = OnHosts(made, [[0, 1], [2]])
        found = where.run(work)
    for rank, (rows, weights, ids) in enumerate(found):
        assert rows == [[-1.0, -1.0], [pytest.approx(-(rank + 1) / 6)] * 2]
        assert weights == [-1.0 if rank == 2 else -2.0] * 2
        assert ids == [0, 1, 2, 3]


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_worker_without_further_batches_does_not_stop_the_others(early: int) -> None:
    """Also when it is the one that speaks to the servers."""

    def work(rank: int) -> list[float]:
        store = where.store(rank)
        store.set_optimizer("sgd", {"lr": 1.0})
        weights = {"a": torch.zeros(3)}
        store.declare(weights, complete=True)
        for _ in range(1 if rank == early else 3):
            store.update({"a": torch.full((3,), 1.0 + rank)}, weights, Share(1.0, 1.0))
        store.close()
        return weights["a"].tolist()

    with job(3) as made:
        where = OnHosts(made, [[0, 1], [2]])
        found = where.run(work)
    left = [rank + 1.0 for rank in range(3) if rank != early]
    for rank, weights in enumerate(found):
        assert weights == [pytest.approx(-2.0 if rank == early else -2.0 - 2 * sum(left) / 2)] * 3


def test_states_go_on_with_hosts_and_without(tmp_path: Path) -> None:
    def part(store: KVStore, steps: range) -> Weights:
        net = model(seed=store.rank)
        if steps.start:
            net.load_state_dict(torch.load(tmp_path / "weights"))
        trainer = Trainer(net, "adam", {"learning_rate": 0.01}, kvstore=store)
        if steps.start:
            trainer.load_states(tmp_path / "states")
            trainer.set_learning_rate(0.01)
        take_steps(net, trainer, store, steps)
        if not steps.start:
            trainer.save_states(tmp_path / "states")
            if store.rank == 0:
                torch.save(net.state_dict(), tmp_path / "weights")
        store.close()
        return weights_of(net)

    for first_on_hosts in (True, False):
        with job(3, 2) as made:
            for number, steps in enumerate((range(7), range(7, 20))):
                where = OnHosts(
                    made, [[0, 1, 2]] if first_on_hosts == (number == 0) else [[0], [1], [2]]
                )
                found = where.run(
                    lambda rank, w=where, n=number, s=steps: part(w.store(rank, n), s)
                )  # type: ignore[misc]
        for weights in found:
            assert largest_difference(weights, by_hand("adam")) <= 1e-6


def test_mistakes_are_errors_on_all_workers_of_the_host() -> None:
    """Neither a call that differs nor what the servers refuse leaves the others waiting."""

    def different(rank: int) -> str:
        store = where.store(rank)
        store.declare({"a": torch.zeros(2)})
        return error_of(lambda: store.barrier() if rank else store.pull("a"))

    def refused(rank: int) -> str:
        store = where.store(rank)
        store.set_gradient_compression({"type": "fp16"})
        store.declare({"a": torch.zeros(2)})
        grad = torch.full((2,), float("nan") if rank else 0.0)
        return error_of(lambda: store.reduce({"a": grad}, Share()))

    for call, texts in (
        (different, ["worker 0 is in 'pull", "worker 1 is in 'barrier'"]),
        (refused, ["2 of 2 values for 'a' are NaN", "2 of 2 values for 'a' are NaN"]),
    ):
        with job(2) as made:
            where = OnHosts(made, [[0, 1]])
            for found, text in zip(where.run(call), texts, strict=True):
                assert text in found


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("rule", ["stop", "continue"])
def test_the_loss_of_a_worker_ends_its_host_in_time(lost: int, rule: str) -> None:
    """And the other host, or not, as with the loss of any member."""
    lease = 1.5

    def work(rank: int) -> tuple[str, float]:
        store = where.store(rank)
        store.set_optimizer("sgd", {"lr": 1.0})
        weights = {"a": torch.zeros(3)}
        store.declare(weights, complete=True)
        store.update({"a": torch.ones(3)}, weights, Share(1.0, 1.0))
        gone.wait(10.0)
        if rank == lost:
            where.groups[rank]._ending.set()  # no more beats
            if store._dense is not None:  # type: ignore[attr-defined]
                for link in store._dense.links:  # type: ignore[attr-defined]
                    link.abandon()
            over.wait(20.0)
            store._closed = True  # type: ignore[attr-defined]
            return "lost", 0.0
        began = time.monotonic()
        try:
            store.update({"a": torch.ones(3)}, weights, Share(1.0, 1.0))
        except WorldError as error:
            return str(error), time.monotonic() - began
        finally:
            over.wait(20.0)
        return "went on", weights["a"][0].item()

    with job(3, 1, lease) as made:
        where, gone, over = (
            OnHosts(made, [[0, 1], [2]], lease, on_worker_loss=rule),
            threading.Barrier(3),
            threading.Barrier(3),
        )
        found = where.run(work)
    text, took = found[1 - lost]
    assert f"worker {lost} (" in text
    assert "of a host (0, 1) are one member" in text
    assert took < lease + patience(1.0)
    if rule == "continue":
        assert found[2] == ("went on", -2.0)
    else:
        assert "worker 0" in found[2][0]


def test_what_create_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one worker a host it is the store of dist_sync, and so are the bits; restarts of one
    worker are refused."""
    monkeypatch.setenv("ALLHANDS_NUM_SERVERS", "1")
    alone = World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "alone")
    monkeypatch.setattr(host_store, "init", lambda: alone)
    numbers = itertools.count()
    with job(1) as made:
        monkeypatch.setattr(
            ServedStore,
            "connect",
            lambda mode, options: made.store(0, mode.name, next(numbers), **options),
        )
        found = []
        for name in ("dist_sync", "dist_device_sync", "dist_sync_device"):
            store = create(name)
            assert type(store) is ServedStore
            net = model()
            take_steps(
                net, Trainer(net, "adam", {"learning_rate": 0.01}, kvstore=store), store, range(20)
            )
            found.append(weights_of(net))
            store.close()
        assert same(found[0], found[1])
        assert same(found[0], found[2])
        monkeypatch.setenv("ALLHANDS_ON_WORKER_FAILURE", "restart")
        monkeypatch.setattr(host_store, "init", lambda: replace(alone, local_world_size=2))
        assert "create('dist_sync'), where each worker is a member" in error_of(
            lambda: create("dist_device_sync")
        )


def in_a_process(device: str | None) -> dict[str, Any]:
    world = allhands.init(device=device)
    found: dict[str, Any] = {}
    for name in ("adam", "momentum"):
        net, store = model(seed=world.rank).to(world.device), create("dist_device_sync")
        take_steps(
            net, Trainer(net, *OPTIMIZERS[name][:2], kvstore=store), store, range(len(SIZES))
        )
        store.close()
        found[name] = {key: value.cpu() for key, value in net.state_dict().items()}
        found["store"] = (type(store).__name__, sorted(store._group._groups))  # type: ignore[attr-defined]
    # The last worker has a batch more, also at the end of its script.
    store, weights = create("dist_device_sync"), {"a": torch.zeros(3, device=world.device)}
    store.set_optimizer("sgd", {"lr": 1.0})
    store.declare(weights, complete=True)
    for _ in range(1 + world.rank):
        store.update(
            {"a": torch.full_like(weights["a"], 1.0 + world.rank)}, weights, Share(1.0, 1.0)
        )
    store.close()
    found["more"] = weights["a"].tolist()
    allhands.finalize()
    return found


def check_processes(found: list[dict[str, Any]], groups: list[str], tolerance: float) -> None:
    for one in found:
        assert one["store"] == ("HostStore", groups)
        for name in ("adam", "momentum"):
            assert largest_difference(one[name], by_hand(name)) <= tolerance
            assert same(one[name], found[0][name])
    assert [one["more"] for one in found] == [[-1.5] * 3, [-3.5] * 3]


@pytest.mark.serial
def test_processes_of_this_host() -> None:
    check_processes(spawn(in_a_process, ("cpu",), workers=2, servers=1), ["cpu"], 1e-6)


@pytest.mark.gpu(2)
def test_one_process_a_gpu() -> None:
    check_processes(spawn(in_a_process, (None,), workers=2, servers=1), ["cpu", "cuda"], 1e-5)
