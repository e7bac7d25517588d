"""Real processes that meet, each forked from one that has imported torch, and what they print."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patience
from tests.world import world_script

SCRIPT = str(Path(__file__).with_name("world_script.py"))
Told = dict[str, Any]


# Of the variables that name a world.
WORLD_PREFIXES = (
    "SLURM_",
    "OMPI_",
    "PMI",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "TORCHELASTIC",
    "ALLHANDS_LAUNCH",
    "GLOO_",
)


def clean_environ() -> dict[str, str]:
    """This process's variables without those that name a world."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(WORLD_PREFIXES)
    }


# Starts processes from one that has imported torch, which takes most of the time of a new one.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch.distributed", "allhands.world", "tests.world.world_script"])


@contextlib.contextmanager
def started(
    jobs: Sequence[tuple[dict[str, str], Told]], folder: Path
) -> Iterator[list[BaseProcess]]:
    """One process for each (variables, arguments of init), which prints into `folder`; all are gone
    afterwards."""
    processes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # no threads where processes are forked
        forkserver.ensure_running()
    try:
        for number, (variables, asked) in enumerate(jobs):
            environ = (
                clean_environ() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | variables
            )
            paths = (str(folder / f"out-{number}"), str(folder / f"err-{number}"))
            processes.append(
                FORKS.Process(target=world_script.forked, args=(environ, json.dumps(asked), *paths))
            )
            processes[-1].start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_all(jobs: Sequence[tuple[dict[str, str], Told]], timeout: float = 60) -> list[Told]:
    """What each process printed, in order."""
    with tempfile.TemporaryDirectory() as name, started(jobs, folder := Path(name)) as processes:
        deadline = time.monotonic() + patience(timeout)
        told = []
        for number, process in enumerate(processes):
            process.join(max(deadline - time.monotonic(), 1))
            assert not process.is_alive(), f"process {number} has not ended within {timeout} s"
            out = (folder / f"out-{number}").read_text()
            assert out.strip(), (folder / f"err-{number}").read_text()
            told.append(json.loads(out.strip().splitlines()[-1]))
        return told


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def check_world(told: list[Told], environment: str, sums: float | None = None) -> None:
    size = len(told)
    assert [entry["rank"] for entry in told] == list(range(size)), told
    assert [entry["local_rank"] for entry in told] == list(range(size))
    assert (
        {entry["local_world_size"] for entry in told}
        == {entry["world_size"] for entry in told}
        == {size}
    )
    assert {entry["node_rank"] for entry in told} == {0}
    assert {entry["sum"] for entry in told} == {size * (size + 1) / 2}
    assert {entry["environment"] for entry in told} == {environment}
    assert {entry["backend"] for entry in told} == {"gloo"}
    assert [entry["main"] for entry in told] == [rank == 0 for rank in range(size)]
