"""The mpi backend under mpiexec of MPICH and mpirun of Open MPI: one start of each runs all probes
(`mpi_probes`)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.comm import mpi_groups, mpi_moves, mpi_probes, mpi_training  # noqa: F401  (add theirs)
from tests.pages import run_page
from tests.patience import patience
from tests.world.forked_processes import clean_environ

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

LAUNCHERS = {
    "mpich": [str(Path(sys.executable).with_name("mpiexec"))],
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"],
}
RANKS = {"mpich": 3, "openmpi": 2}


def launcher(name: str) -> list[str]:
    """The command of a launcher; skips the test where it cannot run."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: pip install mpi4py")
    command = LAUNCHERS[name]
    if shutil.which(command[0]) is None:
        pytest.skip(
            {
                "mpich": "no mpiexec beside python: pip install mpich",
                "openmpi": "no mpirun.openmpi: apt install openmpi-bin",
            }[name]
        )
    return command


def start(
    name: str, ranks: int, *arguments: str, timeout: float = 60, **variables: str
) -> tuple[int, str, float]:
    """Exit code, output and seconds of `ranks` Pythons with these arguments; none is left when this
    returns."""
    environ = clean_environ() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
    command = [
        *launcher(name),
        "-n",
        str(ranks),
        sys.executable,
        "-W",
        "ignore::FutureWarning",
        *arguments,
    ]
    begun = time.monotonic()
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=patience(timeout))
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks
            output, _ = process.communicate(timeout=10)
            pytest.fail(f"still running after {timeout} s:\n{output[-3000:]}")
    return process.returncode, output, time.monotonic() - begun


@pytest.fixture(scope="module", params=LAUNCHERS)
def probed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What came of all probes on each rank."""
    folder = tmp_path_factory.mktemp("probes")
    ranks = RANKS[request.param]
    code, output, _ = start(
        request.param, ranks, "-m", "tests.comm.mpi_probes", str(folder), timeout=120
    )
    assert code == 0, output[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("name", mpi_probes.PROBES)
def test_probe(name: str, probed: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(probed):
        assert results[name]["ok"], f"rank {rank}: {results[name]['told']}"


def test_the_library_is_the_launchers(probed: list[dict[str, Any]]) -> None:
    assert {3: "MPICH", 2: "Open MPI"}[len(probed)] in probed[0]["library"]["told"]


ENDS = """
import os, signal, sys, time
import allhands, torch, torch.distributed as dist

how, mode = sys.argv[1:]
if how == "gloo that met through MPI":
    # As if each rank were on a host of its own.
    os.environ.update({"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"})
allhands.init(how.split()[0])
total = torch.ones(1)
dist.all_reduce(total)
assert ("mpi4py.MPI" in sys.modules) == (how != "gloo")
if dist.get_rank() == 1:
    if mode == "raises":
        raise ValueError("no such class: 11")
    if mode == "exits":
        sys.exit(3)
    if mode == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
if mode == "raises":
    time.sleep(100)  # computes, and notices nothing by itself
dist.all_reduce(total)
print("went on", total)
"""


# Each launcher and kind of world with each failure where it is ours to see; the rest is what mpirun
# does with any program.
FAILURES = [
    ("mpich", "mpi", "raises"),
    ("openmpi", "mpi", "raises"),
    ("mpich", "mpi", "exits"),
    ("mpich", "gloo", "raises"),
    # rare: Open MPI and exit codes are in rows of mpi, worlds of gloo in the other ones.
    pytest.param("openmpi", "gloo", "raises", marks=pytest.mark.rare),
    pytest.param("mpich", "gloo", "exits", marks=pytest.mark.rare),
    ("mpich", "gloo", "is killed"),
    ("mpich", "gloo that met through MPI", "raises"),
]


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str, str], tuple[int, str, float]]:
    """Exit code, output and seconds of a job for each failure of a test that was chosen; some run
    at a time, since they mostly wait."""
    failures = [
        tuple(item.callspec.params[key] for key in ("name", "how", "mode"))
        for item in request.session.items
        if getattr(item, "function", None) is test_a_rank_that_fails_ends_the_job
    ]
    script = tmp_path_factory.mktemp("ends") / "ends.py"
    script.write_text(ENDS)
    with ThreadPoolExecutor(3) as pool:
        jobs = {
            failure: pool.submit(start, failure[0], 2, str(script), *failure[1:])
            for failure in failures
            if shutil.which(LAUNCHERS[failure[0]][0])
        }
        return {failure: job.result() for failure, job in jobs.items()}


@pytest.mark.parametrize(("name", "how", "mode"), FAILURES)
def test_a_rank_that_fails_ends_the_job(
    name: str, how: str, mode: str, request: pytest.FixtureRequest
) -> None:
    launcher(name)
    code, output, seconds = request.getfixturevalue("ended")[name, how, mode]
    assert code != 0, output
    assert seconds < patience(30), output
    assert "went on" not in output
    if mode == "raises":
        assert "allhands: rank 1 on " in output, output
        assert "raised ValueError: no such class: 11; it ends the job" in output
    if (how, mode) == ("mpi", "exits"):
        assert "all_reduce number 1 (float32 of shape [1]), on rank 0" in output, output
        assert "can never be complete: rank 1 has left" in output
    if (name, mode) == ("mpich", "is killed"):
        assert "Killed (signal 9)" in output, output


def test_the_page_about_mpi(tmp_path: Path) -> None:
    """Its first example, the send and receive of the distributed notes, and a failure."""
    launcher("mpich")
    environ = clean_environ() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environ.pop("PYTHONUNBUFFERED", None)  # mpiexec glues lines that are written in parts
    assert run_page("mpi.md", tmp_path, environ) == 4


def test_other_launchers_are_refused_before_mpi_starts(tmp_path: Path) -> None:
    launcher("mpich")
    (tmp_path / "other.py").write_text(
        "import allhands, torch.distributed as dist\n"
        "for make in (lambda: allhands.init('mpi', timeout=20), lambda: "
        "dist.init_process_group('mpi')):\n"
        "    try:\n"
        "        make()\n"
        "    except allhands.WorldError as error:\n"
        "        print(error)\n"
    )
    environ = clean_environ() | {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29999",
    }
    done = subprocess.run(
        [sys.executable, str(tmp_path / "other.py")], env=environ, capture_output=True, text=True
    )
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 2, done.stdout + done.stderr
    for line in lines:
        assert "torchrun started the 2 processes and MPI knows nothing of it" in line
        assert "mpirun -n 2" in line
        assert "srun --mpi=pmi2" in line


def test_a_library_of_another_mpi_is_named(tmp_path: Path) -> None:
    """To a process that Open MPI started, MPICH's library gives a world of one; here the launcher
    is pretended."""
    launcher("mpich")
    library = Path(sys.prefix, "lib", "libmpi.so.12")
    if not library.exists():
        pytest.skip("no MPICH from a wheel in this environment: pip install mpich")
    variables = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "MPI4PY_LIBMPI": str(library),
    }
    code = "import allhands, torch.distributed as dist; dist.init_process_group('mpi')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environ() | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "openmpi says rank 0 of 2, but MPI says rank 0 of 1" in done.stderr, done.stderr
    assert "MPICH" in done.stderr


def test_less_than_thread_multiple_is_refused() -> None:
    launcher("mpich")
    code = "import allhands, torch.distributed as dist; dist.init_process_group('mpi')"
    environ = clean_environ() | {"MPI4PY_RC_THREAD_LEVEL": "funneled"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode != 0
    assert "MPI_THREAD_MULTIPLE" in done.stderr, done.stderr
    assert "MPI4PY_RC_THREAD_LEVEL" in done.stderr


def test_a_world_of_one_needs_no_launcher() -> None:
    launcher("mpich")
    code = (
        "import torch, torch.distributed as dist, allhands\n"  # torch first
        "dist.init_process_group('mpi')\n"
        "t = torch.ones(2); dist.all_reduce(t); dist.all_gather([t], t.clone()); dist.barrier()\n"
        "print(t.tolist(), dist.get_world_size(), dist.get_backend(), dist.is_mpi_available())\n"
        "dist.destroy_process_group(); dist.init_process_group('mpi'); dist.all_reduce(t); "
        "print('again', t.tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environ(), capture_output=True, text=True
    )
    assert done.stdout == "[1.0, 1.0] 1 mpi True\nagain [1.0, 1.0]\n", done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.gpu
def test_cuda_tensors_are_staged(tmp_path: Path) -> None:
    """All ranks share the first GPU; what the probes do on the CPU is repeated there."""
    launcher("mpich")
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    code, output, _ = start(
        "mpich",
        2,
        "-m",
        "tests.comm.mpi_gpu_probes",
        str(tmp_path),
        CUDA_VISIBLE_DEVICES=devices,
        ALLHANDS_MPI_CUDA="0",
    )
    assert code == 0, output[-4000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "ok": True,
            "device": "cuda:0",
        }
