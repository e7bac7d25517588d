"""A server that dies is started again from a snapshot, and the training is the one that would have
been."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from allhands.errors import UserError, WorldError
from allhands.kvstore import comeback
from allhands.kvstore.rules import rules_of
from allhands.kvstore.served import ServedStore
from allhands.kvstore.store import Share
from allhands.kvstore.store_modes import mode_named
from tests.kvstore.launching import ending_by_hand, launch_with_servers
from tests.kvstore.restarted_servers import finding_store, restart, training_data
from tests.kvstore.serving import Job, job
from tests.patience import patience

STEPS = 12


def _wait_for_snapshots(made: Job) -> None:
    """Snapshots are written while the training goes on; these trainings are over in
    milliseconds."""
    deadline = time.monotonic() + patience(10)
    for server in made.servers:
        recovery = server.shards[0].recovery
        assert recovery is not None
        while not recovery.snapshots.steps() and time.monotonic() < deadline:
            time.sleep(0.01)


def _train(
    folder: Path,
    kill_at: int | None,
    transport: str = "shared",
    kind: str = "dist",
    clip: float | None = 0.5,
    before: Any = None,
    settings: bool = False,
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Two workers, two servers; server 1 dies after so many steps. The weights, and the numbers of
    worker 0's steps."""
    first, grads = training_data(STEPS)
    with job(2, 2) as made:

        def work(rank: int) -> tuple[dict[str, torch.Tensor], list[int]]:
            store = finding_store(
                made, rank, transport, kind, snapshot_every=3, snapshot_dir=folder
            )
            store.set_optimizer("adam", {"lr": 0.01})
            if settings:  # values come back in fewer bits
                store.set_gradient_compression({"name": "none", "pull": "fp16"})
            store.declare(first, complete=True)
            outs = {name: torch.empty_like(value) for name, value in first.items()}
            taken, step, killed = [], 0, False
            while step < STEPS:
                if rank == 0 and step == kill_at and not killed:
                    killed = True
                    if step >= 3:
                        _wait_for_snapshots(made)
                    if before is not None:
                        before(made)
                    restart(made, 1)
                # Most steps leave the learning rate as it was.
                groups = [{"lr": 0.1 / (1 + step)}] if settings and step % 4 == 1 else None
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


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_server_comes_back_and_at_most_so_many_steps_are_taken_again(
    tmp_path: Path, transport: str
) -> None:
    whole, taken = _train(tmp_path / "whole", None, transport)
    assert taken == list(range(1, STEPS + 1))
    for kill_at in (4, 9):
        again, taken = _train(tmp_path / f"killed-{kill_at}", kill_at, transport)
        back = taken[taken.index(kill_at) + 1]
        # With a snapshot of the very step that was taken last, its gradients are simply sent again.
        assert (back % 3 == 0 and kill_at - 3 <= back <= kill_at) or (
            back == kill_at + 1 and kill_at % 3 == 0
        )
        for name, value in whole.items():
            assert torch.equal(value, again[name]), name


def test_a_snapshot_has_what_was_set_and_what_compression_has_left_over(tmp_path: Path) -> None:
    whole, _ = _train(tmp_path / "whole", None, settings=True)
    again, taken = _train(tmp_path / "killed", 8, settings=True)
    assert taken[taken.index(8) + 1] in (3, 6)
    for name, value in whole.items():
        assert torch.equal(value, again[name]), name


def test_snapshots_are_of_this_job_only_and_go_with_it(tmp_path: Path) -> None:
    rules = rules_of(mode_named("dist"), {"snapshot_every": 1, "snapshot_dir": tmp_path})
    (tmp_path / "job-another-store-0" / "server-0").mkdir(parents=True)
    (tmp_path / "job-another-store-0" / "server-0" / "step-99.safetensors").write_bytes(b"")
    with job(1) as made:
        store = ServedStore(mode_named("dist"), 0, 1, list(made.where), rules, 0)
        store.init("a", torch.zeros(3))
        for _ in range(6):
            store.pushpull("a", torch.ones(3))
        deadline = time.monotonic() + patience(10)
        while (known := store.links[0].ask("snapshots")["steps"]) != [
            4,
            5,
            6,
        ] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert known == [4, 5, 6]
        store.close()
        while made.servers[0].shards[0].members.everyone() and time.monotonic() < deadline:
            time.sleep(0.02)
        made.servers[0].forget_finished()
    assert [path.name for path in tmp_path.iterdir()] == ["job-another-store-0"]


def test_a_server_that_is_lost_before_any_snapshot_ends_the_training_with_a_reason(
    tmp_path: Path,
) -> None:
    with pytest.raises(WorldError, match=r"before there was a snapshot .*snapshot_every"):
        _train(tmp_path, 1)


def test_a_server_without_a_key_comes_back_too(tmp_path: Path) -> None:
    with job(1, 2) as made:
        store = finding_store(made, 0, snapshot_every=1, snapshot_dir=tmp_path)
        store.init("a", torch.zeros(3))
        assert {piece.server for piece in store._pieces["a"]} == {0}
        out = torch.empty(3)
        for step in range(6):
            if step == 3:
                restart(made, 1)
            store.pushpull("a", torch.full((3,), float(step)), out)
            assert out.tolist() == [float(step)] * 3
        store.barrier()


def test_a_damaged_snapshot_is_named(tmp_path: Path) -> None:
    def damage(made: Job) -> None:
        deadline = time.monotonic() + patience(10)
        while (
            not (found := sorted(tmp_path.rglob("server-1/step-3.safetensors")))
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        with found[0].open("r+b") as file:
            file.truncate(100)

    with pytest.raises(WorldError, match=r"server-1/step-3\.safetensors cannot be used"):
        _train(tmp_path, 4, before=damage)


def test_a_server_that_does_not_come_back_is_waited_for_with_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comeback, "RETURN_TIMEOUT", 1.0)
    with job(1) as made:
        store = finding_store(made, 0, snapshot_every=1, snapshot_dir=tmp_path)
        store.init("a", torch.zeros(3))
        made.servers[0].close()
        with pytest.raises(
            WorldError, match=r"was not started again within 1 s; .*--server-restarts"
        ):
            store.pushpull("a", torch.ones(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshot_every": 5}, "belong together"),
        ({"snapshot_dir": "x"}, "belong together"),
        ({"snapshot_every": -1, "snapshot_dir": "x"}, "whole number"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rules_of(mode_named("dist"), options)


SCRIPT = """
import os, signal, sys, time
import torch
from allhands import kvstore
store = kvstore.create("dist", snapshot_every=2, snapshot_dir=sys.argv[1])
store.set_optimizer("sgd", lr=0.1, momentum=0.9)
weights = {"w": torch.ones(50_000), "b": torch.zeros(7)}
store.declare(weights, complete=True)
outs = {name: torch.empty_like(value) for name, value in weights.items()}
step, kills = 0, True
while step < 9:
    if step == 5 and kills and store.rank == 0:
        kills = False
        while not all(link.ask("snapshots")["steps"] for link in store.links):
            time.sleep(0.01)
        os.kill(store.links[1].where["pid"], signal.SIGKILL)
    gradient = 1.0 + step + store.rank
    grads = {name: torch.full_like(value, gradient) for name, value in weights.items()}
    step = store.update(grads, outs, kvstore.Share(1.0, 1.0)).number
print("sum", float(outs["w"].double().sum()).hex(), float(outs["b"].double().sum()).hex())
"""


# rare: test_mid_round.py kills a server of a job that has snapshots, test_mirror.py one that a
# training uses.
@pytest.mark.rare
@pytest.mark.serial
def test_the_launcher_starts_a_killed_server_again_and_the_weights_are_the_same(
    tmp_path: Path,
) -> None:
    told, said = launch_with_servers(tmp_path, SCRIPT, str(tmp_path / "snapshots"))
    assert "all go on from step" in said
    assert told == [ending_by_hand()] * 2
    assert not list((tmp_path / "snapshots").rglob("*.safetensors"))  # the job has ended well
