"""The names of stores; and those in which workers do not wait for all others, on servers."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.kvstore import Share, Trainer, create
from allhands.kvstore.rules import rules_of
from allhands.kvstore.store_modes import MODES, mode_named
from tests.kvstore.serving import error_of, job, same, trained, weights_of
from tests.kvstore.training import model

# ---------------------------------------------------------------------- names and options


def test_names_in_any_case_and_a_typo() -> None:
    waits = {name: mode_named(name.upper()).wait for name in MODES}
    assert waits == {
        "local": "sync",
        "device": "sync",
        "dist": "sync",
        "dist_sync": "sync",
        "dist_device_sync": "sync",
        "dist_sync_device": "sync",
        "dist_async": "async",
        "dist_async_device": "async",
        "dist_device_async": "async",
        "dist_ssp": "ssp",
    }
    assert create("local_allreduce_cpu").type == create("local_update_cpu").type == "local"
    assert create("local_allreduce_device").type == "device"
    text = error_of(lambda: mode_named("dist_asinc"))
    assert text.startswith(
        "there is no key-value store 'dist_asinc'; did you mean 'dist_async'? Known are: local, "
        "device, "
    )
    assert error_of(lambda: mode_named(3)).startswith(
        "create(3); write the name of a kind of store: local"
    )  # type: ignore[arg-type]


def test_without_servers_async_and_ssp_say_how_to_start_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ALLHANDS_NUM_SERVERS", raising=False)
    for name in ("dist_async", "dist_ssp"):
        assert ("write `allhands launch -s 1 …`") in error_of(lambda name=name: create(name))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("dist_ssp", {}, "create('dist_ssp') needs staleness=…"),
        (
            "dist_ssp",
            {"staleness": -1},
            "staleness=-1; it must be a whole number of steps, at least 0",
        ),
        ("dist_ssp", {"staleness": 1.5}, "staleness=1.5"),
        ("dist_ssp", {"staleness": True}, "staleness=True"),
        ("dist_sync", {"staleness": 3}, "only 'dist_ssp' bounds staleness"),
        ("dist_sync", {"damping": True}, "synchronous steps are never stale"),
        (
            "dist_async",
            {"stalenes": 3},
            "has no option 'stalenes'; its options are staleness, damping, on_worker_loss",
        ),
        (
            "dist",
            {"on_worker_loss": "wait"},
            "'wait'; it must be one of 'stop', 'continue'",
        ),
    ],
)
def test_options_that_cannot_be(name: str, options: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError) as raised:
        rules_of(mode_named(name), options)
    assert part in str(raised.value)


# ---------------------------------------------------------------------- async


def test_async_without_an_optimizer_is_an_error_that_names_the_key() -> None:
    def work(rank: int) -> list[str]:
        store = made.store(rank, "dist_async")
        store.init("w", torch.full((3,), 2.0))
        found = []
        if rank == 1:
            found.append(error_of(lambda: store.push("w", torch.ones(3))))
            found.append(error_of(lambda: store.pushpull("w", torch.ones(3))))
            found.append(error_of(lambda: store.reduce({"w": torch.ones(3)}, Share())))
            found.append(
                error_of(
                    lambda: Trainer(
                        {"v": nn.Parameter(torch.ones(1))},
                        "sgd",
                        kvstore=store,
                        update_on_kvstore=False,
                    )
                )
            )
        assert store.pull("w").tolist() == [2.0] * 3
        store.barrier()
        store.set_optimizer("sgd", lr=1.0)
        store.push("w", torch.ones(3))
        store.barrier()  # after it, everyone sees what was pushed before
        assert store.pull("w").tolist() == [0.0] * 3
        return found

    with job(2, servers=2) as made:
        *pushes, trainer = made.run(work)[1]
    for text in pushes:
        assert text.startswith(
            "the key 'w' cannot be pushed: create('dist_async') applies each push by itself"
        )
    assert "update_on_kvstore=False with 'dist_async'" in trainer


def test_async_applies_on_arrival_and_measures_staleness() -> None:
    with job(2) as made:
        zero, one = made.store(0, "dist_async"), None

        def second() -> None:
            nonlocal one
            one = made.store(1, "dist_async")
            one.set_optimizer("sgd", lr=1.0)
            one.init("w", torch.zeros(2))

        thread = threading.Thread(target=second)
        thread.start()
        zero.set_optimizer("sgd", lr=1.0)
        zero.init("w", torch.zeros(2))
        thread.join(20)
        assert one is not None
        grad, out = torch.ones(2), torch.empty(2)
        zero.pull("w")
        one.pull("w")
        for number in range(3):  # nobody waits for worker 1
            step = zero.update({"w": grad}, {"w": out}, Share())
            assert (step.number, step.workers, step.staleness) == (number + 1, 1, 0.0)
            assert out.tolist() == [-1.0 - number] * 2
        step = one.update({"w": grad}, {"w": out}, Share())
        assert step.staleness == 3.0  # what worker 0 has done since worker 1 read
        assert out.tolist() == [-4.0] * 2
        one.push("w", grad)  # its own pushes make nothing stale
        one.push("w", grad)
        assert one.update({"w": grad}, {"w": out}, Share()).staleness == 0.0
        assert out.tolist() == [-7.0] * 2
        # No samples: it only reads.
        assert zero.update({"w": grad}, {"w": out}, Share(0, 1.0)).staleness == 0.0
        assert out.tolist() == [-7.0] * 2
        assert zero.update({}, {"w": out}, Share(0)).number == 0
        assert out.tolist() == [-7.0] * 2


def test_the_staleness_is_the_largest_of_all_chunks_and_reaches_what_the_bound_allows() -> None:
    """Bound 1, two workers: up to (2 - 1)(2 * 1 + 1) pushes between a read and a push."""
    keys = {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(3)}

    def begun(rank: int) -> Any:
        store = made.store(rank, "dist_ssp", staleness=1)
        store.set_optimizer("sgd", lr=1.0)
        store.init(list(keys), list(keys.values()))
        for name in keys:
            store.pull(name)
        return store

    with job(2, servers=2) as made:
        zero, one = made.run(begun)
        grads, outs = (
            {name: torch.ones(3) for name in keys},
            {name: torch.empty(3) for name in keys},
        )
        assert zero.update(grads, outs, Share()).staleness == 0
        assert [one.update(grads, outs, Share()).staleness for _ in range(2)] == [1, 0]
        one.push(list(keys), list(grads.values()))
        one._settle()
        zero.push("c", grads["c"])  # it waits for nothing, and reads this key anew
        zero.pull("c")
        stale = zero.update(grads, outs, Share()).staleness
        assert (stale, type(stale)) == (3, int)


def test_damping_divides_the_rate_by_the_staleness() -> None:
    def second() -> None:
        stores.append(made.store(1, "dist_async", damping=True))
        stores[1].set_optimizer("sgd", lr=1.0)
        stores[1].init("w", torch.zeros(1))

    with job(2) as made:
        stores = [made.store(0, "dist_async", damping=True)]
        thread = threading.Thread(target=second)
        thread.start()
        stores[0].set_optimizer("sgd", lr=1.0)
        stores[0].init("w", torch.zeros(1))
        thread.join(20)
        out, one = torch.empty(1), torch.ones(1)
        stores[1].pull("w", out)
        for _ in range(3):
            stores[0].update({"w": one}, {"w": out}, Share())
        stores[1].update({"w": one}, {"w": out}, Share())
        assert out.item() == -3.25  # 1 / (1 + 3)
        stores[1].update({"w": one}, {"w": out}, Share(), [{"lr": 0.5}])
        assert out.item() == -3.75
        stores[0].update({"w": one}, {"w": out}, Share(), [{"lr": 0.6}])
        assert out.item() == pytest.approx(-3.95)  # 0.6 / (1 + 2)


def test_a_read_never_overtakes_the_own_push() -> None:
    with job(1, servers=2) as made:
        store = made.store(0, "dist_async")
        store.set_optimizer("sgd", lr=1.0)
        store.init(["a", "b"], [torch.zeros(2)] * 2)
        for number in range(20):
            held, link = threading.Event(), store.links[number % 2]
            link.put(lambda held=held: held.wait(10), priority=1 << 62)
            store.push(["a", "b"], [torch.ones(2)] * 2, priority=-5)
            timer = threading.Timer(0.005, held.set)
            timer.start()
            assert [value.tolist() for value in store.pull(["a", "b"])] == [[-1.0 - number] * 2] * 2


def test_async_training_converges_with_trainers() -> None:
    target, X = torch.randn(5, generator=torch.Generator().manual_seed(1)), torch.randn(64, 5)
    nets = [nn.Linear(5, 1, bias=False) for _ in range(3)]

    def work(rank: int) -> None:
        trainer = Trainer(
            nets[rank], "sgd", {"lr": 0.05}, kvstore=made.store(rank, "dist_async"), clip_norm=5.0
        )
        for step in range(120):
            part = X[(step * 8 + rank * 16) % 64 :][:8]
            (nets[rank](part)[:, 0] - part @ target).square().sum().backward()
            trainer.step(len(part))

    with job(3) as made:
        made.run(work)
    for net in nets:
        assert float((net.weight.detach()[0] - target).abs().max()) < 0.02


# ---------------------------------------------------------------------- ssp


def test_staleness_0_is_sync() -> None:
    with job(3, servers=2) as made:
        sync = trained(made, "momentum", "dist_sync", 0)
        ssp = trained(made, "momentum", "dist_ssp", 1, {"staleness": 0})
    assert all(same(ours, theirs) for ours, theirs in zip(sync, ssp, strict=True))


@pytest.mark.parametrize(("staleness", "by_key"), [(1, False), (3, False), (2, True)])
def test_nobody_runs_further_ahead_than_the_bound(staleness: int, by_key: bool) -> None:
    """Over random delays: 3 times 360 steps, each of which is looked at when its worker may go
    on."""
    workers, steps = 4, 90
    clocks, lock = [0] * workers, threading.Lock()
    observed: list[int] = []

    def work(rank: int) -> None:
        rng = random.Random(f"{staleness} {rank}")
        store = made.store(rank, "dist_ssp", staleness=staleness)
        store.set_optimizer("sgd", lr=1.0)
        store.init(["a", "b"], [torch.zeros(3), torch.zeros(40)])
        grads, outs = (
            {"a": torch.ones(3), "b": torch.ones(40)},
            {"a": torch.empty(3), "b": torch.empty(40)},
        )
        for _ in range(steps):
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.002 * (1 + 2 * (rank == 0)))
            with lock:
                # Before the push: another worker may see its step in what it reads at once.
                clocks[rank] += 1
            if by_key:
                store.push(["a", "b"], list(grads.values()))
                store.pull(["b", "a"], [outs["b"], outs["a"]])
            else:
                store.update(grads, outs, Share())
            with lock:
                observed.append(clocks[rank] - min(clocks))
        with lock:
            clocks[rank] = 1 << 30  # it leaves, and holds nobody up
        store.close()

    with job(workers, servers=2) as made:
        made.run(work)
    assert len(observed) == workers * steps  # all came to the end
    assert max(observed) <= staleness
    assert max(observed) >= 1  # and somebody did run ahead


def test_a_worker_without_samples_keeps_up() -> None:
    def work(rank: int) -> float:
        store = made.store(rank, "dist_ssp", staleness=1)
        net = nets[rank]
        trainer = Trainer(net, "sgd", {"lr": 1.0}, kvstore=store)
        for _ in range(6):
            if rank == 0:
                net(torch.ones(1, 1)).sum().backward()
                trainer.step(1)
            else:
                store.update({}, {"weight": net.weight.detach()}, Share(0))
        store.barrier()
        store.pull("weight", net.weight.detach())
        return net.weight.item()

    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for net in nets:
        nn.init.zeros_(net.weight)
    with job(2) as made:
        assert made.run(work) == [-6.0, -6.0]


def test_what_runs_ahead_waits_until_the_slow_one_has_pushed_or_left() -> None:
    def work(rank: int) -> list[str]:
        store = made.store(rank, "dist_ssp", staleness=1)
        store.set_optimizer("sgd", lr=1.0)
        store.init("w", torch.zeros(1))
        if rank == 1:
            held.wait(10)
            time.sleep(0.05)
            events.append("1 pushes")
            store.push("w", torch.ones(1))
            time.sleep(0.05)
            events.append("1 leaves")
            store.close()
            return []
        out = torch.empty(1)
        for number in range(4):
            if number == 1:
                held.set()
            store.update({"w": torch.ones(1)}, {"w": out}, Share())
            events.append(f"0 took {number + 1}")
        return []

    events: list[str] = []
    held = threading.Event()
    with job(2) as made:
        made.run(work)
    assert events == ["0 took 1", "1 pushes", "0 took 2", "1 leaves", "0 took 3", "0 took 4"]


def test_one_worker_has_the_same_bits_in_every_mode() -> None:
    found = {}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("dist_sync", {}),
        ("dist_async", {}),
        ("dist_ssp", {"staleness": 2}),
    ]
    for number, (kind, rules) in enumerate(kinds):
        with job(1, servers=3) as made:
            store = made.store(0, kind, number, **rules)
            net = model()
            trainer = Trainer(net, "adam", {"lr": 0.01}, kvstore=store)
            for step in range(5):
                net(torch.full((3, 5), 1.0 + step)).square().sum().backward()
                trainer.step(3)
            found[kind] = weights_of(net)
    assert same(found["dist_async"], found["dist_sync"])
    assert same(found["dist_ssp"], found["dist_sync"])
