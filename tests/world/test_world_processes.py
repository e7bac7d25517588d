"""Real processes that meet, or do not. Every wait is bounded, and every process is ended by the
test that started it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import allhands
from allhands.launch import spawn
from tests.patience import patience
from tests.world.forked_processes import (
    SCRIPT,
    check_world,
    clean_environ,
    free_port,
    run_all,
    started,
)

SLURM_STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_UID": "0",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_NODES": "1",
}
pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]


def test_env() -> None:
    port = str(free_port())
    jobs = [
        ({"RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, {})
        for r in range(2)
    ]
    check_world(
        run_all([(variables, {"init_method": "env://"}) for variables, _ in jobs]), "torchrun"
    )


def test_tcp() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    check_world(
        run_all([({}, {"init_method": method, "rank": r, "world_size": 4}) for r in range(4)]),
        "explicit",
    )


def test_tcp_with_numbers_in_the_url() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    check_world(
        run_all([({}, {"init_method": f"{method}?rank={r}&world_size=2"}) for r in range(2)]),
        "explicit",
    )


def test_file(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/meet"
    check_world(
        run_all([({}, {"init_method": method, "rank": r, "world_size": 3}) for r in range(3)]),
        "explicit",
    )


def test_a_stale_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "meet").write_bytes(b"")
    method = f"file://{tmp_path}/meet"
    with started(
        [({}, {"init_method": method, "rank": 0, "world_size": 2, "timeout": 60})], tmp_path
    ) as processes:
        # A run that is killed before it could clear its file.
        deadline = time.monotonic() + patience(60)
        while not (tmp_path / "meet").stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        processes[0].kill()
        processes[0].join(10)
    told = run_all(
        [({}, {"init_method": method, "rank": r, "world_size": 2, "timeout": 20}) for r in range(2)]
    )
    assert "remove it" in told[0]["error"]
    assert "error" in told[1]


def slurm_task(job: str, rank: int, size: int) -> dict[str, str]:
    numbers = {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": 0,
        "SLURM_STEP_NUM_TASKS": size,
    }
    return (
        SLURM_STEP
        | {name: str(number) for name, number in numbers.items()}
        | {"SLURM_JOB_ID": job, "SLURM_STEP_TASKS_PER_NODE": str(size)}
    )


def test_two_slurm_jobs_on_one_host_each_meet_their_own() -> None:
    jobs = [(slurm_task(job, rank, 2), {}) for rank in range(2) for job in ("101", "102")]
    told = run_all(jobs)
    check_world(told[0::2], "slurm")
    check_world(told[1::2], "slurm")


def connects_late(folder: str) -> bool:
    """Rank 1 is still busy with its group when rank 0 has made its own."""
    import torch.distributed as dist

    late = Path(folder, "late")
    if os.environ["RANK"] == "1":
        barrier = dist.barrier

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.3)
            late.touch()
            return barrier(*args, **kwargs)

        dist.barrier = slow
    allhands.init(device="cpu")
    return late.exists()


def test_no_rank_leaves_init_while_another_still_connects(tmp_path: Path) -> None:
    assert spawn(connects_late, (str(tmp_path),), workers=2) == [True, True]


def test_a_missing_rank_is_named_on_every_rank() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    begun = time.monotonic()
    asked = {"init_method": method, "world_size": 4, "timeout": 5}
    told = run_all([({}, asked | {"rank": r}) for r in (0, 2)])
    assert time.monotonic() - begun < patience(30)
    for entry in told:
        assert "WorldError: 2 of 4 processes met at 127.0.0.1:" in entry["error"]
        assert "missing: rank 1, 3" in entry["error"]


def test_a_missing_rank_0_is_named() -> None:
    told = run_all(
        [
            (
                {},
                {
                    "init_method": f"tcp://127.0.0.1:{free_port()}",
                    "rank": 1,
                    "world_size": 2,
                    "timeout": 3,
                },
            )
        ]
    )
    assert "rank 1 waited 3 s for rank 0 at 127.0.0.1:" in told[0]["error"]


def test_a_missing_rank_0_of_a_slurm_step_is_named() -> None:
    told = run_all([(slurm_task("103", 1, 2), {"timeout": 2})])
    assert "waited 2 s for rank 0 on 127.0.0.1" in told[0]["error"]


def test_contradicting_world_sizes_are_told_to_all_before_the_timeout() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    begun = time.monotonic()
    told = run_all(
        [
            ({}, {"init_method": method, "rank": r, "world_size": n, "timeout": 60})
            for r, n in ((0, 3), (1, 2))
        ]
    )
    assert time.monotonic() - begun < patience(30)
    for entry in told:
        assert "rank 0" in entry["error"]
        assert "world_size=3 but rank 1" in entry["error"]


def test_a_rank_that_comes_twice_is_an_error_at_once() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    begun = time.monotonic()
    told = run_all(
        [
            ({}, {"init_method": method, "rank": r, "world_size": 3, "timeout": 60})
            for r in (0, 1, 1)
        ]
    )
    assert time.monotonic() - begun < patience(30)
    for entry in told:
        assert "two processes say that they are rank 1 of 3" in entry["error"]


def test_a_taken_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        method = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        told = run_all([({}, {"init_method": method, "rank": 0, "world_size": 2, "timeout": 5})])
    assert "rank 0 cannot listen on port" in told[0]["error"]


def test_torchrun(tmp_path: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [
        str(torchrun),
        "--standalone",
        "--nproc-per-node=3",
        f"--log-dir={tmp_path}",
        "--redirects=1",
        SCRIPT,
        "{}",
    ]
    environ = clean_environ() | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, env=environ, check=True, capture_output=True)
    lines = [path.read_text().strip().splitlines()[-1] for path in tmp_path.rglob("stdout.log")]
    check_world(
        sorted((json.loads(line) for line in lines), key=lambda entry: int(entry["rank"])),
        "torchrun",
    )


def test_torchrun_of_one_has_a_group() -> None:
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    check_world(run_all([(variables, {})]), "torchrun")


def test_arguments_that_repeat_the_environment_use_its_meeting_point() -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    told = run_all([(variables | {"RANK": str(r)}, {"rank": r, "world_size": 2}) for r in range(2)])
    check_world(told, "torchrun")


def _mpi(program: str, *words: str) -> list[Any]:
    """What three ranks print, each one JSON value."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"no {program} on the PATH")
    environ = clean_environ() | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    environ |= {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    command = [found, "-n", "3", sys.executable, *words]
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    # Neither mpirun keeps the lines of its ranks apart, so the values are read one after another.
    told, rest = [], done.stdout.strip()
    while rest:
        entry, end = json.JSONDecoder().raw_decode(rest)
        told.append(entry)
        rest = rest[end:].strip()
    return told


@pytest.mark.parametrize("program", ["mpiexec.hydra", "mpirun"])
def test_mpi(program: str) -> None:
    told = _mpi(program, SCRIPT, "{}")
    told.sort(key=lambda entry: int(entry["rank"]))
    assert {entry["environment"] for entry in told} <= {"openmpi", "mpich"}
    assert {entry["sum"] for entry in told} == {6.0}
    assert sorted(entry["local_rank"] for entry in told) == [0, 1, 2]


TELL = """
import json, os
from allhands.world.environments.mpi import broadcast_meeting
from allhands.world.layout import Meeting
from allhands.world.mpilib import load_mpi
first = load_mpi().COMM_WORLD.Get_rank() == 0
told = broadcast_meeting(Meeting(("here", "there"), 4242) if first else None)
print(json.dumps([told.hosts, told.port, os.environ["ALLHANDS_TOKEN"]]))
"""


@pytest.mark.parametrize("program", ["mpiexec.hydra", "mpirun"])
def test_mpi_tells_the_ranks_of_several_hosts_a_secret_too(program: str) -> None:
    pytest.importorskip("mpi4py")
    told, again = _mpi(program, "-c", TELL), _mpi(program, "-c", TELL)
    assert told == [told[0]] * 3
    assert told[0][:2] == [["here", "there"], 4242]
    assert len(told[0][2]) == 64
    assert told[0][2] != again[0][2]


@pytest.mark.gpu(2)
def test_two_gpus_one_each() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    unhidden = {"CUDA_VISIBLE_DEVICES": "0,1"}
    told = run_all(
        [(unhidden, {"init_method": method, "rank": r, "world_size": 2}) for r in range(2)],
        timeout=100,
    )
    assert [entry["device"] for entry in told] == ["cuda:0", "cuda:1"]
    assert {entry["backend"] for entry in told} == {"nccl"}
    assert {entry["sum"] for entry in told} == {3.0}


@pytest.mark.gpu(2)
def test_one_visible_gpu_a_rank() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    jobs = [
        ({"CUDA_VISIBLE_DEVICES": str(r)}, {"init_method": method, "rank": r, "world_size": 2})
        for r in range(2)
    ]
    told = run_all(jobs, timeout=100)
    assert [entry["device"] for entry in told] == ["cuda:0", "cuda:0"]
    assert {entry["sum"] for entry in told} == {3.0}


@pytest.mark.gpu
def test_two_workers_on_the_only_gpu_are_refused() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    only = {"CUDA_VISIBLE_DEVICES": "0"}
    told = run_all(
        [(only, {"init_method": method, "rank": r, "world_size": 2}) for r in range(2)], timeout=100
    )
    for entry in told:
        assert "UserError: 2 workers on" in entry["error"]
        assert "but 1 GPU that rank 0 can use" in entry["error"]
