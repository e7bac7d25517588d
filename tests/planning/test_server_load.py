"""Parameter servers in a plan: what they and their workers send, hold and wait for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import allhands
from allhands import KVStore, SupervisedRunner
from allhands.comm.traffic import SERVERS, Collective
from allhands.kvstore.optimizers import spec_of_torch
from allhands.kvstore.store import Share
from allhands.launch import spawn
from allhands.models.transformer import GPT, NextToken
from allhands.planning.candidates import Candidate
from allhands.planning.dry_step import dry_step
from allhands.planning.machines import Link, Links
from allhands.planning.plan import plan
from allhands.planning.server_load import ServerLoad
from tests.kvstore.serving import job
from tests.planning.test_dry_step import SAMPLES, SIZES, plain, trained_for, workload
from tests.worlds import ONE_THREAD, PRELOAD


def trained(mode: str, servers: int, workers: int, options: dict[str, Any]) -> Any:
    allhands.init(device="cpu")
    try:
        return trained_for(KVStore(mode, servers=servers, **options), workers, 3)[1]
    finally:
        allhands.finalize()


ONE_BYTE_A_SECOND = Links(*[Link("slow", 1.0, 0.0)] * 2)
ALL = [
    (mode, workers, servers, {})
    for mode in ("sync", "async")
    for workers in (2, 4)
    for servers in (1, 2)
]
QUICK = (("sync", 2, 2), ("async", 4, 1))


@pytest.mark.serial
@pytest.mark.parametrize(
    ("mode", "workers", "servers", "options"),
    [
        *(pytest.param(*one, marks=[] if one[:3] in QUICK else [pytest.mark.rare]) for one in ALL),
        ("sync", 2, 1, {"compress": "fp16"}),
    ],
)
def test_the_bytes_are_those_of_a_training(
    mode: str, workers: int, servers: int, options: dict[str, Any]
) -> None:
    sent = spawn(
        trained,
        (mode, servers, workers, options),
        workers=workers,
        servers=servers,
        env=ONE_THREAD,
        preload=PRELOAD,
    )
    for rank in range(workers):
        strategy = KVStore(mode, servers=servers, **options)
        step = dry_step(workload(1), strategy, workers, rank)
        assert plain(step.transfers) == sent[rank], rank
        assert sum(one.kind == "send" for one in step.transfers) == servers


def row(gpus: int, **options: Any) -> Any:
    with torch.device("meta"):
        model = GPT(**SIZES, tied=False)
    batch = torch.zeros(SAMPLES, 16, dtype=torch.int64)
    strategy = options.pop("strategy")
    return plan(
        model=model,
        criterion=NextToken(),
        optimizer=torch.optim.AdamW(model.parameters()),
        batch=(batch, batch),
        gpus=gpus,
        runner=SupervisedRunner(device="cpu"),
        strategies=[Candidate(strategy, {"name": "kvstore"})],
        **options,
    ).rows[0]


def test_a_server_holds_what_the_plan_says() -> None:
    model = GPT(**SIZES, tied=False)
    named = {name: one.detach() for name, one in model.named_parameters()}
    with job(workers=1, servers=2) as made:
        store = made.store(0)
        store.set_optimizer(spec_of_torch(torch.optim.AdamW(model.parameters()))[0])
        store.declare(named, complete=True)
        store.update({name: torch.ones_like(one) for name, one in named.items()}, named, Share())
        parts = [list(server.shards[0].parts.values()) for server in made.servers]
        weights = [sum(part.weights.nbytes for part in of_one) for of_one in parts]
        states = [
            sum(one.nbytes for part in of_one for one in part.optimizer.state()[0].values())
            for of_one in parts
        ]
    load = row(2, strategy=KVStore(servers=2)).servers
    assert load.memory["weights"] == max(weights)
    assert load.memory["optimizer"] == max(states)
    assert load.memory["pushes"] == 2 * max(weights)
    assert load.received == load.sent == 2 * max(weights)


def test_the_link_of_a_server_carries_what_all_workers_send() -> None:
    one, two = (row(8, strategy=KVStore(servers=n), link="eth1", per_host=1) for n in (1, 2))
    assert one.sent == two.sent
    assert one.servers.received == pytest.approx(2 * two.servers.received, rel=0.05)
    # The worker beside the server needs no link.
    assert one.seconds.waiting > 7 / 8 * one.servers.received / 0.1e9
    assert one.seconds.waiting > two.seconds.waiting
    # A worker that waits for nobody waits for its own values alone, while the server keeps up.
    alone = row(2, strategy=KVStore("async", servers=1), link="eth1", per_host=1)
    assert (
        alone.seconds.waiting
        <= row(2, strategy=KVStore(servers=1), link="eth1", per_host=1).seconds.waiting
    )
    many = row(64, strategy=KVStore("async", servers=1), link="eth1", per_host=1)
    assert many.seconds.total >= 63 / 64 * many.servers.received / 0.1e9
    assert "1 server holds at most" in str(many.servers)
    assert many.to_dict()["servers"]["peak"] == many.servers.peak
    assert "pieces" not in many.to_dict()["servers"]


def test_servers_of_the_workers_own_host_share_memory_with_them() -> None:
    strategy = KVStore(servers=1)
    together, apart = (
        row(2, strategy=strategy, link="eth1", per_host=hosts).seconds.waiting for hosts in (2, 1)
    )
    assert together < apart / 3


def test_new_values_come_back_while_the_next_gradients_are_on_their_way() -> None:
    def waiting(*sizes: int, exchange: float = 0.0) -> float:
        load = ServerLoad(1, {}, 0, 0, False, [(0, size) for size in sizes])
        step = replace(
            dry_step(workload(1), KVStore(servers=1), 2),
            events=[
                ("update", Collective(kind, sum(sizes), 2, SERVERS, 0)) for kind in ("send", "recv")
            ],
        )
        return load.waiting(step, 0.0, ONE_BYTE_A_SECOND, 1, exchange)

    assert waiting(12) == pytest.approx(12 + 12)
    assert waiting(6, 6) == pytest.approx(12 + 6)
    assert waiting(*[1] * 12) == pytest.approx(12 + 1)
    # The server has a part of its time for each piece.
    assert waiting(6, 6, exchange=2.0) == pytest.approx(12 + 1 + 6)
    assert waiting(6, 6, exchange=24.0) == pytest.approx(6 + 24 + 6)
