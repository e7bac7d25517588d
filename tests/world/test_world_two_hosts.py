"""Two hosts, made of network namespaces on this one: each with its own address and a name that
resolves to loopback.

Needs Linux, root and the `ip` program; skips without them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patience
from tests.world.forked_processes import SCRIPT, clean_environ

pytestmark = [pytest.mark.serial, pytest.mark.slow, pytest.mark.usefixtures("forked_python")]
# Debian's default, and the trap: a host's own name is a loopback address there.
HOSTS = "127.0.0.1 localhost\n127.0.1.1 {own}\n10.213.77.1 n1\n10.213.77.2 n2\n"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[str]]:
    """The namespaces of the hosts n1 and n2, joined by one cable."""
    names = [f"allhands{os.getpid()}n{number}" for number in (1, 2)]
    folders = [Path("/etc/netns") / name for name in names]
    try:
        try:
            for number, (name, folder) in enumerate(zip(names, folders, strict=True), 1):
                ip("netns", "add", name)
                folder.mkdir(parents=True)
                (folder / "hosts").write_text(HOSTS.format(own=f"n{number}-own"))
            ip(
                "link",
                "add",
                "eth0",
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                names[1],
            )
            for number, name in enumerate(names, 1):
                ip("-n", name, "addr", "add", f"10.213.77.{number}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"cannot make network namespaces: {error}")
        yield names
    finally:
        for name, folder in zip(names, folders, strict=True):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                ip("netns", "delete", name)
            (folder / "hosts").unlink(missing_ok=True)
            if folder.is_dir():
                folder.rmdir()


def run_on(
    hosts: Sequence[str], placed: Sequence[int], variables: Sequence[dict[str, str]]
) -> list[dict[str, Any]]:
    """One process for each of `variables` on host number `placed`; what each told, in order."""
    processes = []
    try:
        for number, extra in zip(placed, variables, strict=True):
            own_name = f'hostname n{number}-own 2>/dev/null; exec "$@"'
            command = [
                "ip",
                "netns",
                "exec",
                hosts[number - 1],
                "unshare",
                "--uts",
                "sh",
                "-c",
                own_name,
                "sh",
            ]
            command += [sys.executable, SCRIPT, json.dumps({"timeout": 60})]
            environ = clean_environ() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | extra
            processes.append(
                subprocess.Popen(
                    command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        told = []
        for process in processes:
            out, err = process.communicate(timeout=patience(100))
            assert out.strip(), err
            told.append(json.loads(out.strip().splitlines()[-1]))
        return told
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def slurm_task(rank: int, node: int, local: int) -> dict[str, str]:
    numbers = {
        "PROCID": rank,
        "NODEID": node,
        "LOCALID": local,
        "STEP_ID": 0,
        "STEP_NUM_TASKS": 4,
        "JOB_ID": os.getpid(),
    }
    texts = {"STEP_TASKS_PER_NODE": "2(x2)", "STEP_NODELIST": "n[1-2]"}
    return {f"SLURM_{name}": str(value) for name, value in (numbers | texts).items()}


# rare: cluster/test_srun.py has tasks of a real srun on two hosts.
@pytest.mark.rare
@pytest.mark.parametrize("first", [1, 2])
def test_slurm_on_two_hosts_whichever_has_rank_0(two_hosts: list[str], first: int) -> None:
    placed = [first, first, 3 - first, 3 - first]
    tasks = [slurm_task(rank, placed[rank] - 1, rank % 2) for rank in range(4)]
    told = run_on(two_hosts, placed, tasks)
    assert [entry.get("sum") for entry in told] == [10.0] * 4, told
    assert [entry["node_rank"] for entry in told] == [number - 1 for number in placed]
    assert [entry["local_rank"] for entry in told] == [0, 1, 0, 1]


# rare: the hosts above are told by Slurm; world/test_world_processes.py counts on one.
@pytest.mark.rare
def test_local_ranks_are_counted_over_the_hosts_when_nobody_tells_them(
    two_hosts: list[str],
) -> None:
    variables = [
        {"RANK": str(r), "WORLD_SIZE": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "23456"}
        for r in range(3)
    ]
    told = run_on(two_hosts, [1, 2, 1], variables)
    assert [entry.get("sum") for entry in told] == [6.0] * 3, told
    assert [
        (entry["local_rank"], entry["local_world_size"], entry["node_rank"]) for entry in told
    ] == [
        (0, 2, 0),
        (0, 1, 1),
        (1, 2, 0),
    ]
