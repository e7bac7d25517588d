"""Elastic jobs over ssh hosts and on the nodes of a Slurm allocation: workers and hosts that are
lost, that leave, and that join."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.launching import Launch, allhands, shared_folder
from tests.cluster.slurm import Slurm
from tests.launch.elastic_jobs import SCRIPT, alone, assert_same, result
from tests.patience import patience

pytestmark = pytest.mark.usefixtures("forked_python")

# Steps are slow until a file says that all has happened.
SLOW = SCRIPT.replace("epochs(3)", "epochs(40)").replace(
    "time.sleep(pause)", 'time.sleep(0 if os.path.exists("go") else pause)'
)


def prepared(cluster: Hosts | Slurm) -> Path:
    folder = shared_folder(cluster, "elastic")
    (folder / "train.py").write_text(SLOW)
    return folder


def ended(job: Launch, folder: Path, batch: int) -> list[Any]:
    """What the job came to, which must be what one process comes to."""
    (folder / "go").touch()
    code, said = job.end(90)
    assert code == 0, said
    found = result(folder)
    assert_same(found, alone(folder / "alone", SLOW, batch))
    return found


def kill_agent(hosts: Hosts, host: str) -> None:
    """Kill what has forked the workers of a host, which is the first of their kind."""
    agents = [one.split()[0] for one in hosts.processes(host) if "allhands.launch.agent" in one]
    hosts.run(host, "kill", "-KILL", min(agents, key=int))


def test_a_spare_worker_on_another_host_takes_part_and_then_that_host_is_lost(hosts: Hosts) -> None:
    folder = prepared(hosts)
    words = ("--elastic", "--spares", "1", "train.py", "4", "0.5", "0@3:SIGKILL")
    with Launch(hosts, folder, "-n", "3", "-H", "hosts", *words) as job:
        job.until("membership 2: 1 worker joined; 3 workers go on", 90)
        kill_agent(hosts, "d2")
        job.until("; 1 worker repeats what was interrupted", 60)
        found = ended(job, folder, 12)
        said = job.said
    assert found[3] == 1
    assert "rank 0 on host d1 was killed by SIGKILL" in said
    for rank in (2, 3):
        assert re.search(rf"rank {rank} on host d2 failed: .*; the others go on", said)
    assert hosts.left(5) == []


def test_a_host_that_comes_back_after_it_was_taken_for_lost_is_left_out(hosts: Hosts) -> None:
    folder = prepared(hosts)
    words = ("--elastic", "--host-timeout", "5", "train.py", "6", "0.5")
    with Launch(hosts, folder, "-n", "2", "-H", "hosts", *words) as job:
        job.until("epoch  train loss", 90)
        hosts.cut("d2")
        try:
            job.until("; 1 worker repeats what was interrupted", 60)
        finally:
            hosts.heal("d2")
        found = ended(job, folder, 12)
        said = job.said
    assert found[3] == 1
    assert re.search(r"rank 1 on host d2 failed: .*; the others go on", said)
    assert hosts.left(20) == []


def test_workers_of_another_host_join_over_the_network(hosts: Hosts) -> None:
    folder = prepared(hosts)
    words = ("--elastic", "--max-workers", "2", "--log-dir", "told", "train.py", "6", "0.5")
    with Launch(hosts, folder, "-n", "1", "-H", "d1", *words) as job:
        job.until("epoch  train loss", 90)
        commands = (folder / "told" / "join.txt").read_text().splitlines()
        command = next(one for one in commands if f" {hosts.driver_address}:" in one)
        line = f"cd {folder} && exec {shlex.join(allhands())} {command.removeprefix('allhands ')}"
        joins = hosts.popen("d2", ["sh", "-c", line])
        job.until("membership 1: 1 worker joined; 2 workers go on", 90)
        assert "host d2 joins with rank 1" in job.said
        found = ended(job, folder, 6)
        assert joins.wait(patience(20)) == 0
    assert found[3] == 2
    assert hosts.left(5) == []


def test_a_slurm_node_that_drains_and_goes_down_is_left_and_the_others_go_on(slurm: Slurm) -> None:
    folder = prepared(slurm)
    words = ("--launcher", "slurm", "--elastic", "train.py", "4", "0.5", "1@3:SIGKILL")
    within = ("salloc", "--quiet", "--no-kill", "--nodes=2")
    try:
        with Launch(slurm, folder, "-n", "3", *words, within=within) as job:
            job.until("membership 1: lost rank 1", 90)
            slurm.command("scontrol", "update", "nodename=d2", "state=drain", "reason=test")
            steps = slurm.command("squeue", "--steps", "-h", "-o", "%i %N").splitlines()
            step = next(line.split()[0] for line in steps if line.split()[1] == "d2")
            # It complains of the job's number, and sends the signal.
            slurm.command("scancel", "--signal=TERM", step, check=False)
            job.until("membership 2: lost rank 2", 60)
            slurm.command("scontrol", "update", "nodename=d2", "state=down", "reason=test")
            job.until("Node failure on d2", 60)
            found = ended(job, folder, 12)
            said = job.said
    finally:
        slurm.command("scontrol", "update", "nodename=d2", "state=resume")
    assert found[3] == 1
    assert "rank 2 on host d2 failed: left on request, by SIGTERM; the others go on" in said
    assert slurm.left(5) == []
