"""Synchronous rounds on servers: the numbers of one process, whatever carries them."""

from __future__ import annotations

import functools
import random
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from allhands.kvstore import Share, Trainer, create, placement, shard_keys
from allhands.kvstore.shard import Shard
from tests.kvstore.serving import error_of, job, same, trained, weights_of
from tests.kvstore.training import OPTIMIZERS, by_hand, largest_difference, model, take_steps
from tests.patience import patience

CLIP = 0.4


# ---------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_one_process(name: str) -> None:
    with job(2, servers=2) as made:
        worlds = trained(made, name)
    for weights in worlds:
        assert largest_difference(weights, by_hand(name)) <= 1e-6
        assert same(weights, worlds[0])


def test_clipping_and_optimizers_in_the_workers() -> None:
    with job(3) as made:
        clipped = trained(made, "momentum", number=0, clip_norm=CLIP)
        here = trained(made, "adam", number=1, update_on_kvstore=False)
        both = trained(made, "momentum", number=2, update_on_kvstore=False, clip_norm=CLIP)
    for number in range(3):
        assert largest_difference(clipped[number], by_hand("momentum", clip_norm=CLIP)) <= 1e-6
        assert largest_difference(here[number], by_hand("adam")) <= 1e-6
        assert largest_difference(both[number], by_hand("momentum", clip_norm=CLIP)) <= 1e-6


def delayed(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Let pushes wait before a server looks at them, so that they come in any order."""
    rng, lock, push = random.Random(seed), threading.Lock(), Shard.push

    def later(self: Shard, *args: Any) -> None:
        with lock:
            seconds = rng.random() * 0.0005
        time.sleep(seconds)
        push(self, *args)

    patch.setattr(Shard, "push", later)


def test_bits_depend_on_nothing_but_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for servers, chunk_bytes, transport, seed in (
        (1, placement.CHUNK_BYTES, "shared", None),
        (2, placement.CHUNK_BYTES, "tcp", 1),
        (3, 64, "unix", 2),
        (8, 100, "shared", 3),
        (1, 4, "tcp", None),
        (8, placement.CHUNK_BYTES, "unix", None),
    ):
        with monkeypatch.context() as patch, job(3, servers) as made:
            patch.setattr(
                shard_keys, "place", functools.partial(placement.place, chunk_bytes=chunk_bytes)
            )
            if seed is not None:
                delayed(patch, seed)
            watched = made.store(0, number=2)
            watched.declare({"w": torch.zeros(84)})
            assert sum(len(server.shards[2].chunks()) for server in made.servers) == -(
                -4 * 84 // min(chunk_bytes, 4 * 84)
            )
            cuts = trained(made, "adam", number=0, transport=transport)
            clipped = trained(made, "momentum", number=1, transport=transport, clip_norm=CLIP)
            found[servers, chunk_bytes, transport] = [*cuts, *clipped]
    first = next(iter(found.values()))
    for how, worlds in found.items():
        for ours, theirs in zip(worlds, first, strict=True):
            assert same(ours, theirs), how


def test_one_worker_is_the_local_store_bit_for_bit() -> None:
    for name, clip in (("sgd", None), ("momentum", CLIP), ("adam", None), ("adamw", CLIP)):
        net, store = model(), create("local")
        optimizer, options, _ = OPTIMIZERS[name]
        take_steps(
            net,
            Trainer(net, optimizer, options, kvstore=store, update_on_kvstore=True, clip_norm=clip),
            store,
            range(20),
        )
        with job(1, servers=2) as made:
            kinds = [
                ("dist_sync", {}),
                ("dist_async", {}),
                ("dist_ssp", {"staleness": 0}),
                ("dist_ssp", {"staleness": 4}),
            ]
            for number, (kind, rules) in enumerate(kinds):
                (weights,) = trained(made, name, kind, number, rules, clip_norm=clip)
                assert same(weights, weights_of(net)), (name, kind)


def test_reductions() -> None:
    """How far SGD with lr=1 moves a weight whose gradient is the input: rank + 1 samples of the
    value rank + 1."""
    expected = {
        "mean": -(1 * 1 + 2 * 2) / 3,
        "sum": -(1 * 1 + 2 * 2) / 3,
        "sum of means": -(1.0 + 2.0),
    }
    options: dict[str, dict[str, Any]] = {
        "mean": {"reduction": "mean"},
        "sum": {},
        "sum of means": {"aggregate": "sum"},
    }
    with job(2) as made:
        for number, (name, how) in enumerate(options.items()):

            def work(rank: int, number: int = number, how: dict[str, Any] = how) -> float:
                net = nn.Linear(1, 1, bias=False)
                trainer = Trainer(
                    net, "sgd", {"lr": 1.0}, kvstore=made.store(rank, number=number), **how
                )
                before = net.weight.item()
                output = net(torch.full((rank + 1, 1), float(rank + 1)))
                (output.mean() if "reduction" in how else output.sum()).backward()
                trainer.step(rank + 1)
                return net.weight.item() - before

            assert made.run(work) == pytest.approx([expected[name]] * 2, abs=1e-6), name


def test_rates_and_batch_sizes_change_from_one_round_to_the_next() -> None:
    net = [nn.Linear(1, 1, bias=False) for _ in range(2)]

    def work(rank: int) -> list[float]:
        trainer = Trainer(
            net[rank], "sgd", {"lr_scheduler": lambda step: 1.0 / step}, kvstore=made.store(rank)
        )
        moved = []
        for size in (4, 1, 2 + rank):
            before = net[rank].weight.item()
            net[rank](torch.ones(size, 1)).sum().backward()
            trainer.step(size)
            moved.append(net[rank].weight.item() - before)
        return moved

    with job(2) as made:
        for moved in made.run(work):
            assert moved == pytest.approx([-1.0, -1 / 2, -1 / 3], abs=1e-6)


def test_torchs_scheduler_acts_on_the_servers() -> None:
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]

    def work(rank: int) -> list[float]:
        trainer = Trainer(nets[rank], "sgd", {"lr": 0.5}, kvstore=made.store(rank))
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.5)
        moved = []
        for _ in range(3):
            before = nets[rank].weight.item()
            nets[rank](torch.ones(1, 1)).sum().backward()
            trainer.step(1)
            scheduler.step()
            moved.append(nets[rank].weight.item() - before)
        return moved

    with job(2) as made:
        assert made.run(work)[1] == pytest.approx([-0.5, -0.25, -0.125], abs=1e-6)


def test_other_rates_on_two_workers_are_an_error_of_the_second_and_the_first_goes_on() -> None:
    def work(rank: int) -> str | float:
        store = made.store(rank)
        store.set_optimizer("sgd", lr=1.0)
        store.init("w", torch.zeros(3))
        out = torch.zeros(3)
        if rank == 1:
            first.wait(10)
            text = error_of(
                lambda: store.update({"w": torch.ones(3)}, {"w": out}, Share(), [{"lr": 0.5}])
            )
            store.close()
            return text
        store.push("w", torch.ones(3))  # the options of set_optimizer, lr=1
        store._settle()
        first.set()
        store.pull("w", out)
        return float(out.sum())

    first = threading.Event()
    with job(2) as made:
        moved, text = made.run(work)
    assert moved == -3.0  # of worker 0 alone: what was refused is not in the sum
    assert "all workers must step with the same" in str(text)


def test_16_bit_weights_with_a_float32_copy_on_the_server() -> None:
    nets = [nn.Linear(6, 5).bfloat16() for _ in range(3)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    X = [torch.randn(4, 6).bfloat16() for _ in range(8)]

    def steps(net: nn.Module, trainer: Trainer, rank: int, workers: int) -> None:
        for one in X:
            part = one[rank * 4 // workers : (rank + 1) * 4 // workers]
            net(part).square().sum().backward()
            trainer.step(len(part))

    def work(rank: int) -> None:
        trainer = Trainer(
            nets[rank], "adam", {"lr": 1e-3, "multi_precision": True}, kvstore=made.store(rank)
        )
        steps(nets[rank], trainer, rank, 2)

    steps(
        nets[2],
        Trainer(
            nets[2],
            "adam",
            {"lr": 1e-3, "multi_precision": True},
            kvstore="local",
            update_on_kvstore=True,
        ),
        0,
        1,
    )
    with job(2) as made:
        made.run(work)
        (chunk,) = [one for one in made.servers[0].shards[0].chunks() if one.key == "bias"]
        assert chunk.optimizer is not None
        master = chunk.optimizer.state()[0]["master"]
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), nets[0].bias.detach())
        # It holds more than the weights do.
        assert not torch.equal(master, master.bfloat16().float())
    assert same(weights_of(nets[0]), weights_of(nets[1]))
    # The sums over the workers are rounded, too.
    assert largest_difference(weights_of(nets[0]), weights_of(nets[2])) <= 0.01


# ---------------------------------------------------------------------- who takes part


def test_a_worker_without_further_batches_leaves_and_one_without_keys_follows() -> None:
    nets = [nn.Linear(1, 1, bias=False) for _ in range(3)]

    def work(rank: int) -> list[int]:
        store = made.store(rank)
        trainer = Trainer(nets[rank], "sgd", {"lr": 1.0}, kvstore=store)
        before, workers = nets[rank].weight.item(), []
        for step in range(3 - rank):  # worker 2 has one batch
            nets[rank](torch.full((1, 1), float(step + 1))).sum().backward()
            trainer.step(1)
            assert trainer.last_step is not None
            workers.append(trainer.last_step.workers)
        assert nets[rank].weight.item() - before == pytest.approx(
            -sum(range(1, 4 - rank)), abs=1e-6
        )
        if rank == 2:
            out = nets[rank].weight.detach()
            taken = store.update(
                {}, {"0.weight" if "0.weight" in store.shapes else "weight": out}, Share(0)
            )
            workers.append(taken.workers)
            # What the two others did.
            assert nets[rank].weight.item() - before == pytest.approx(-3.0, abs=1e-6)
        store.close()
        return workers

    with job(3, servers=2) as made:
        first, second, third = made.run(work)
    assert third == [3, 3]
    assert second == [3, 3]
    assert first == [3, 3, 1]


def test_step_0_on_one_worker_and_on_all() -> None:
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]

    def work(rank: int) -> Any:
        store = made.store(rank)
        trainer = Trainer(nets[rank], "sgd", {"lr": 1.0}, kvstore=store)
        before = nets[rank].weight.item()
        nets[rank](torch.full((1, 1), 5.0)).sum().backward()
        trainer.step(rank)  # of worker 0, whose gradient is not used
        moved = nets[rank].weight.item() - before
        return moved, error_of(lambda: trainer.step(0))

    with job(2) as made:
        for moved, text in made.run(work):
            assert moved == pytest.approx(-5.0, abs=1e-6)
            assert "no worker has a sample in this step" in text


def test_several_stores_at_once_and_one_after_another() -> None:
    barrier = threading.Barrier(2)

    def work(rank: int) -> list[float]:
        one, two = made.store(rank, number=0), made.store(rank, number=1)
        found = []
        for store, value in ((one, 1.0), (two, 10.0)):
            store.init("w", torch.zeros(2))
            store.push("w", torch.full((2,), value))
        found += [float(store.pull("w")[0]) for store in (two, one)]
        one.close()
        two.close()
        # A server hears a goodbye in its own time, and forgets when the next store is made.
        deadline = time.monotonic() + patience(10)
        while any(
            server.shards[n].members.everyone()
            for server in made.servers
            for n in (0, 1)
            if n in server.shards
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        barrier.wait(10)
        three = made.store(rank, number=2)
        three.init("w", torch.full((3,), 7.0 + rank))  # the same name in another shape
        found.append(float(three.pull("w")[0]))
        return found

    with job(2, servers=2) as made:
        assert made.run(work) == [[20.0, 2.0, 7.0]] * 2
        assert [sorted(server.shards) for server in made.servers] == [
            [2],
            [2],
        ]  # what all have left is forgotten


def test_32_workers_start_train_and_stop() -> None:
    before = threading.active_count()

    def work(rank: int) -> float:
        store = made.store(rank)
        store.set_optimizer("sgd", lr=1.0)
        store.init("w", torch.zeros(5))
        for _ in range(5):
            store.push("w", torch.full((5,), float(rank)), weight=1)
            found = store.pull("w")
        store.barrier()
        store.close()
        return float(found[0])

    with job(32) as made:
        assert made.run(work) == pytest.approx([-5 * 15.5] * 32)
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() <= before
