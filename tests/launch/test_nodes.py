"""Tasks that something else has started, one on each node, and that make one world. The real Slurm
is in tests/cluster."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allhands.errors import AllhandsError, UserError, WorldError
from allhands.launch import rendezvous, spawn
from allhands.launch.nodes import NodeFollower
from allhands.world import discovery
from tests.patience import patience

from .conftest import told_servers

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]
HOSTS = ["127.0.0.1", "localhost", "127.0.0.1"]


@pytest.fixture(autouse=True)
def _first_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    # The nodes of these tests are threads of one process.
    monkeypatch.setattr(rendezvous, "_meetings", itertools.repeat(0))


def on_nodes(nodes: int, call: Callable[[int], Any]) -> list[Any]:
    """What `call(node)` gives, or raises, on each node."""

    def guarded(node: int) -> Any:
        try:
            return call(node)
        except AllhandsError as error:
            return error

    with ThreadPoolExecutor(nodes) as pool:
        return list(pool.map(guarded, range(nodes)))


def test_the_nodes_agree_on_who_starts_how_many() -> None:
    met = on_nodes(
        3, lambda node: rendezvous.gather(node, HOSTS, "counts", [2, 4, 1][node], timeout=20)
    )
    for node, one in enumerate(met):
        assert (one.node, one.counts, one.address) == (node, [2, 4, 1], "127.0.0.1")
        assert [place.workers for place in one.places()] == [2, 4, 1]
        one.close()


def test_what_one_node_cannot_do_is_refused_on_all() -> None:
    refused = ["", "workers=3, but this machine shows 2 GPUs", ""]
    for error in on_nodes(
        3, lambda node: rendezvous.gather(node, HOSTS, "refused", 3, refused[node], timeout=20)
    ):
        assert isinstance(error, UserError)
        assert str(error) == f"{socket.gethostname()}: workers=3, but this machine shows 2 GPUs"


def test_other_versions_are_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"Python": "3.11.2", "torch": "2.13.0", "allhands": "0.1"}
    mine = threading.local()
    monkeypatch.setattr(rendezvous, "versions", lambda: found | {"torch": mine.torch})

    def gather(node: int) -> Any:
        mine.torch = f"2.1{2 + node}.0"
        return rendezvous.gather(node, HOSTS[:2], "versions", 1, timeout=20)

    for error in on_nodes(2, gather):
        assert isinstance(error, WorldError)
        assert "has torch 2.13.0, but" in str(error)


def test_a_node_that_does_not_come_is_named() -> None:
    first, second = on_nodes(
        2,
        lambda node: rendezvous.gather(
            node, ["127.0.0.1", "localhost", "n3"], "absent", 1, timeout=1.5
        ),
    )
    assert re.search("2 of 3 nodes met within 2 s; missing: n3", str(first))
    # Where the first name had not been heard yet, the second one of the same machine is.
    assert re.search("reached the task on (127.0.0.1|localhost)", str(second))


def come_to(port: int) -> socket.socket:
    end = time.monotonic() + 10.0
    while True:
        try:
            return socket.create_connection((HOSTS[0], port))
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_strangers_are_passed_over() -> None:
    held: list[socket.socket] = []

    def gather(node: int) -> Any:
        if node == 1:
            port = discovery.candidate_ports("strangers nodes 0")[0]
            silent = [come_to(port), come_to(port)]
            for said in (b"GET / HTTP/1.0\r\n\r\n", b"[" * 100_000 + b"\n", b'{"node": 1}\n'):
                with come_to(port) as stranger:
                    stranger.sendall(said)
            silent[0].sendall(b"G")
            held.extend(silent)
        return rendezvous.gather(node, HOSTS[:2], "strangers", 1 + node, timeout=20)

    for one in on_nodes(2, gather):
        assert one.counts == [1, 2]
        one.close()
    for link in held:
        link.close()


# rare: cluster/test_ssh.py has two servers on two hosts.
@pytest.mark.rare
@pytest.mark.usefixtures("fake_servers")
def test_servers_go_to_one_node_in_turn() -> None:
    def work() -> Any:
        return told_servers(3), os.getppid(), os.environ["ALLHANDS_TOKEN"]

    def call(node: int) -> Any:
        return spawn(
            work,
            workers=1,
            servers=3,
            rendezvous=rendezvous.gather(node, HOSTS[:2], "servers", 1, timeout=20),
        )

    results = on_nodes(2, call)
    assert not any(isinstance(one, Exception) for one in results), results
    agents = [agent for [(_, agent, _)] in results]
    [(told, _, token)] = results[0]
    assert {int(one["ALLHANDS_SERVER"]): one["parent"] for one in told} == {
        0: agents[0],
        1: agents[1],
        2: agents[0],
    }
    assert {one["ALLHANDS_TOKEN"] for one in told} == {results[1][0][2]} == {token}


def test_nodes_that_ask_for_other_numbers_of_servers_are_told() -> None:
    follower: Any = SimpleNamespace(servers=2, host="d2", leader="d1")
    with pytest.raises(
        UserError, match=r"^d2 was called with servers=2, but d1 with servers=3; every node must"
    ):
        NodeFollower._start(follower, {}, {"servers": 3})


SCRIPT = """
import os, sys, time
import torch
from allhands import SupervisedRunner, utils
from tests.runner.problems import arguments


given = arguments(num_epochs=1, logdir=sys.argv[1], distributed=True, workers=int(sys.argv[2]))
history = SupervisedRunner(device="cpu").train(**given)
total = float(sum(p.double().sum() for p in given["model"].parameters()))
print("trained", history["step"], total, flush=True)


def who():
    import allhands
    world = allhands.current_world()
    local = [world.local_rank, world.local_world_size, world.node_rank]
    print("who", [world.rank, world.world_size, *local], flush=True)
    torch.distributed.barrier()
    if world.rank == 2:
        raise ValueError("planted fault")
    time.sleep(100)


utils.distributed_cmd_run(who, workers=int(sys.argv[2]))
print("not reached")
"""


def test_one_world_over_the_tasks_and_its_failure_ends_all_of_them(tmp_path: Path) -> None:
    """The tasks of `srun -N 2` with one and two workers, on this machine: 127.0.0.1 is one node and
    localhost the other."""
    (tmp_path / "train.py").write_text(SCRIPT)
    step = {
        "SLURM_JOB_ID": f"test{os.getpid()}",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "127.0.0.1,localhost",
        "SLURM_LOCALID": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        # Slurm's GPUs must not be believed where torch sees none.
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, "train.py", str(tmp_path / "logs"), str(1 + node)],
            cwd=tmp_path,
            env=os.environ | step | {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        (first, first_errors), (second, second_errors) = [
            task.communicate(timeout=patience(100)) for task in tasks
        ]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    name = socket.gethostname()
    assert f"srun started one task on each of 2 nodes: workers 1 on {name}, 2 on {name}" in first, (
        first_errors
    )
    assert "ddp, 3 workers on cpu" in first
    trained = re.findall(r"trained .*", first + second)
    assert len(trained) == 2
    assert trained[0] == trained[1]
    assert "who [0, 3, 0, 1, 0]" in first
    assert "who [1, 3, 0, 2, 1]" in first
    assert "who [2, 3, 1, 2, 1]" in first
    assert second.startswith("trained")  # the table of epochs is printed once
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "checkpoints",
        "metrics.csv",
        "tensorboard",
    ]
    assert [task.returncode for task in tasks] == [1, 1]
    for errors in (first_errors, second_errors):
        assert re.search(
            r"WorkerError: rank 2 \(\S+, pid \d+\) failed first: raised ValueError: planted fault",
            errors,
        )
    assert "not reached" not in first + second
