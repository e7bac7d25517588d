"""A server that dies has lost nothing, because the next one keeps a copy; the training is the one
that would have been."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allhands.errors import UserError, WorldError
from allhands.kvstore.rules import check_servers, rules_of
from allhands.kvstore.served import ServedStore
from allhands.kvstore.server_link import ServerLink
from allhands.kvstore.store import Share
from allhands.kvstore.store_modes import mode_named
from allhands.kvstore.values import RowSparse
from tests.kvstore.launching import ending_by_hand, launch_with_servers
from tests.kvstore.restarted_servers import SHAPES, finding_store, restart, training_data
from tests.kvstore.serving import Job, Weights, job
from tests.patience import patience

STEPS = 9


def _whole(made: Job, number: int) -> None:
    """Wait until there is a whole copy of a server."""
    keeper, deadline = made.servers[(number + 1) % len(made.servers)], time.monotonic() + 10
    while not (0 in keeper.copies and keeper.copies[0].whole) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert keeper.copies[0].whole


def _store(made: Job, rank: int, transport: str = "auto", **options: Any) -> ServedStore:
    return finding_store(made, rank, transport, mirror=True, **options)


def _train(
    kills: dict[int, Callable[[Job], None]],
    servers: int = 2,
    transport: str = "shared",
    clip: float | None = 0.5,
    compression: dict[str, Any] | None = None,
    optimizer: tuple[str, dict[str, Any]] = ("adam", {"lr": 0.01}),
    rules: dict[str, Any] | None = None,
) -> tuple[Weights, list[int]]:
    """Two workers; before some steps, worker 0 kills servers. The weights, and the numbers of
    worker 0's steps."""
    first, grads = training_data(STEPS)
    rates = [{"lr": 0.01 / (1 + step)} for step in range(STEPS)]
    kills = dict(kills)
    with job(2, servers) as made:

        def work(rank: int) -> tuple[Weights, list[int]]:
            store = _store(made, rank, transport, **(rules or {}))
            store.set_optimizer(*optimizer)
            if compression is not None:
                store.set_gradient_compression(compression)
            store.declare(first, complete=True)
            outs = {name: torch.empty_like(value) for name, value in first.items()}
            taken, step = [], 0
            while step < STEPS:
                if rank == 0 and step in kills:
                    kills.pop(step)(made)
                # Every second step leaves the learning rate as it was, which is a state of the
                # servers, too.
                groups = [rates[step]] if step % 2 else None
                step = store.update(
                    grads[step][rank], outs, Share(3 + rank, 1.0), groups, clip_norm=clip
                ).number
                taken.append(step)
            store.close()
            return outs, taken

        (weights, taken), (others, _) = made.run(work)
        for name, value in weights.items():
            assert torch.equal(value, others[name])
        return weights, taken


def _same(ours: Weights, theirs: Weights) -> None:
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(
    ("servers", "options"),
    [
        (2, {"transport": "shared"}),
        (2, {"transport": "tcp", "clip": None}),
        (3, {"optimizer": ("sgd", {"lr": 0.1, "momentum": 0.9})}),
        (2, {"compression": {"type": "topk", "keep": 0.1}, "clip": None}),
        (2, {"compression": {"type": "fp16"}}),
    ],
)
def test_no_step_is_lost_whichever_server_dies(servers: int, options: dict[str, Any]) -> None:
    expected, taken = _train({}, servers, **options)
    assert taken == list(range(1, STEPS + 1))

    def second(made: Job) -> None:
        _whole(made, 0)
        restart(made, 0)

    ours, taken = _train({2: lambda made: restart(made, 1), 5: second}, servers, **options)
    assert taken == list(range(1, STEPS + 1))
    _same(expected, ours)


def test_a_server_dies_in_the_midst_of_rounds() -> None:
    expected, _ = _train({}, clip=0.5)
    for delay in (0.0, 0.002, 0.01, 0.03):

        def later(made: Job, delay: float = delay) -> None:
            def kill() -> None:
                time.sleep(delay)
                restart(made, 1)

            made.extra = threading.Thread(target=kill, daemon=True)  # type: ignore[attr-defined]
            made.extra.start()  # type: ignore[attr-defined]

        ours, taken = _train({3: later}, clip=0.5)
        assert taken == list(range(1, STEPS + 1))
        _same(expected, ours)


def test_the_keeper_of_a_copy_dies_and_the_next_copy_is_whole(
    capfd: pytest.CaptureFixture[str],
) -> None:
    expected, _ = _train({})
    told = []

    def second(made: Job) -> None:
        _whole(made, 1)
        told.append(capfd.readouterr().out)
        restart(made, 1)

    capfd.readouterr()
    ours, taken = _train({2: lambda made: restart(made, 0), 6: second})
    assert taken == list(range(1, STEPS + 1))
    _same(expected, ours)
    assert (
        told[0].count("server 1 goes on without a copy, because server 0, which keeps it, is lost")
        == 1
    )


def test_without_any_copy_a_snapshot_is_next(tmp_path: Path) -> None:
    expected, _ = _train({})

    def both(made: Job) -> None:
        deadline = time.monotonic() + patience(10)
        while (
            not all(server.shards[0].recovery.steps() for server in made.servers)
            and time.monotonic() < deadline
        ):  # type: ignore[union-attr]
            time.sleep(0.01)
        restart(made, 0, 1)

    ours, taken = _train({5: both}, rules={"snapshot_every": 3, "snapshot_dir": tmp_path})
    assert taken[5] in (3, 4)  # 4: its snapshot was of the very step
    _same(expected, ours)


def test_without_copy_and_snapshots_the_reason_is_told() -> None:
    with pytest.raises(
        WorldError, match=r"server .+ was lost, and so was the copy .*snapshot_every"
    ):
        _train({5: lambda made: restart(made, 0, 1)})


def test_a_copy_that_is_too_old_is_never_taken_for_the_present() -> None:
    def cut(made: Job) -> None:
        """The connection to the mirror was lost some steps ago."""
        mirror = made.servers[1].shards[0].mirror
        mirror.close()

    with pytest.raises(WorldError, match="older than what workers have got"):
        _train({2: cut, 5: lambda made: restart(made, 1)})


def test_values_and_rows_that_were_pushed_and_not_read_are_pushed_again() -> None:
    table = RowSparse(rows=100, columns=2)
    found = []
    for kill in (False, True):
        with job(1, 2) as made:
            store = _store(made, 0)
            store.set_optimizer("adagrad", {"lr": 0.5})
            store.init("a", torch.zeros(700_000))
            store.init("t", table)
            ids, rows = torch.tensor([[7, 4, 99]]), torch.arange(6.0).view(3, 2)
            out = torch.empty(700_000)
            for step in range(4):
                store.push("a", torch.full((700_000,), 1.0 + step))
                store.push(
                    "t", torch.sparse_coo_tensor(ids, rows + step, (100, 2), check_invariants=True)
                )
                if kill and step in (1, 2):
                    _whole(made, step - 1)
                    restart(made, step - 1)
                store.pull("a", out)
                got = store.row_sparse_pull("t", row_ids=torch.tensor([4, 99, 7, 1]))
            store.barrier()
            store.close()
            found.append({"a": out.clone(), "t": got})
    _same(*found)


@pytest.mark.parametrize("lost", [0, 1])
def test_rows_and_dense_keys_that_are_clipped_together_survive_too(lost: int) -> None:
    table = RowSparse(rows=50, columns=3)
    ids = torch.tensor([[4, 7, 9], [1, 4, 30]])

    def train(kill: bool) -> list[Weights]:
        with job(2, 2) as made:

            def work(rank: int) -> Weights:
                store = _store(made, rank)
                store.set_optimizer("sgd", {"lr": 0.5, "momentum": 0.9})
                store.declare({"w": torch.ones(700), "t": table})
                out = torch.empty(700)
                for step in range(6):
                    if kill and rank == 0 and step in (2, 4):
                        _whole(made, lost)
                        restart(made, lost)
                    rows = torch.full((3, 3), 1.0 + rank + step)
                    sparse = torch.sparse_coo_tensor(
                        ids[rank][None], rows, (50, 3), is_coalesced=True, check_invariants=True
                    )
                    grads = {"w": torch.full((700,), 1.0 + step), "t": sparse}
                    taken = store.update(grads, {"w": out}, Share(2.0, 1.0), clip_norm=0.5)
                    assert taken.number == step + 1
                found = store.row_sparse_pull("t", row_ids=torch.arange(50))
                store.barrier()
                store.close()
                return {"w": out, "t": found}

            return made.run(work)

    expected = train(False)
    _same(expected[0], expected[1])
    for ours in train(True):
        _same(expected[0], ours)
    norm = (expected[0]["w"] - 1).norm() ** 2 + expected[0]["t"].norm() ** 2
    assert 0.5 < norm**0.5 < 0.5 * 0.5 * 60  # bounded steps, which add up


def test_a_norm_of_the_time_before_is_not_taken_for_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Square sums were on their way to a worker while it noticed that another server was lost."""
    expected, _ = _train({})
    stale: dict[int, dict[int, float]] = {}
    begin, forget = ServedStore._begin, ServerLink.forget

    def seen(store: ServedStore, *given: Any, **more: Any) -> Any:
        begun = begin(store, *given, **more)
        stale[begun[0]] = {0: 1e6}
        return begun

    def late(link: ServerLink) -> None:
        forget(link)
        link.squares.update(stale)

    monkeypatch.setattr(ServedStore, "_begin", seen)
    monkeypatch.setattr(ServerLink, "forget", late)
    ours, _ = _train({3: lambda made: restart(made, 1)})
    assert stale
    _same(expected, ours)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "dist_async",
            {"mirror": True},
            r"synchronous stores only; write create\('dist', mirror=True\)",
        ),
        ("dist_ssp", {"mirror": True, "staleness": 2}, "synchronous stores only"),
        ("dist", {"mirror": 3}, "mirror=3; it must be True or False"),
    ],
)
def test_options_that_cannot_be(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rules_of(mode_named(kind), options)


def test_one_server_has_no_mirror() -> None:
    mode = mode_named("dist")
    with pytest.raises(
        UserError, match=r"needs a second server.* `allhands launch -s 2 …`, or leave mirror out"
    ):
        check_servers(mode, rules_of(mode, {"mirror": True}), 1)
    with job(1) as made, pytest.raises(UserError, match="needs a second server"):
        _store(made, 0)


SCRIPT = """
import os, signal, sys
import torch
from allhands import kvstore
assert "torch._dynamo" in sys.modules, "the agent has it for all"
store = kvstore.create("dist", mirror=True)
store.set_optimizer("sgd", lr=0.1, momentum=0.9)
weights = {"w": torch.ones(50_000), "b": torch.zeros(7)}
store.declare(weights, complete=True)
outs = {name: torch.empty_like(value) for name, value in weights.items()}
taken = []
for step in range(9):
    if step == 5 and store.rank == 0:
        os.kill(store.links[1].where["pid"], signal.SIGKILL)
    gradient = 1.0 + step + store.rank
    grads = {name: torch.full_like(value, gradient) for name, value in weights.items()}
    taken.append(store.update(grads, outs, kvstore.Share(1.0, 1.0)).number)
assert taken == list(range(1, 10)), taken
print("sum", float(outs["w"].double().sum()).hex(), float(outs["b"].double().sum()).hex())
"""


@pytest.mark.serial
def test_the_launcher_starts_a_killed_server_again_and_no_step_is_lost(tmp_path: Path) -> None:
    told, said = launch_with_servers(tmp_path, SCRIPT)
    assert "no step is lost" in said
    assert told == [ending_by_hand()] * 2


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("when", ["state", "before load", "after load"])
def test_a_state_is_read_or_loaded_again_when_a_server_dies_meanwhile(when: str, lost: int) -> None:
    def train(kill: bool) -> list[Any]:
        with job(2, 2) as made:

            def work(rank: int) -> tuple[Weights, Any]:
                store = _store(made, rank)
                store.set_optimizer("adam", {"lr": 0.01})
                store.declare(
                    {name: torch.zeros(shape) for name, shape in SHAPES.items()}, complete=True
                )
                outs = {name: torch.empty(shape) for name, shape in SHAPES.items()}

                def steps(first: int, last: int) -> None:
                    for step in range(first, last):
                        store.update(
                            {name: torch.full(SHAPES[name], 1.0 + rank + step) for name in outs},
                            outs,
                            Share(),
                        )

                steps(0, 3)
                early = store.state()
                steps(3, 5)
                if rank == 0 and kill:
                    _whole(made, lost)
                    name = "_settle" if when == "state" else "_give_state"
                    whole = getattr(store, name)

                    def dying(*given: Any) -> None:
                        setattr(store, name, whole)
                        if when == "before load":
                            restart(made, lost)
                        whole(*given)
                        if when != "before load":
                            restart(made, lost)

                    if when != "state":
                        setattr(store, name, dying)
                        store.load_state(early)
                    else:
                        store.barrier()
                        setattr(store, name, dying)
                elif when != "state":
                    store.load_state(early)
                else:
                    store.barrier()
                late = store.state()
                store.barrier()
                steps(5, 8)
                store.close()
                return outs, late

            return made.run(work)

    for ours, theirs in zip(train(True), train(False), strict=True):
        _same(theirs[0], ours[0])
        assert (ours[1].step, ours[1].numbers) == (theirs[1].step, theirs[1].numbers)
        for name, states in theirs[1].tensors.items():
            _same(states, ours[1].tensors[name])
