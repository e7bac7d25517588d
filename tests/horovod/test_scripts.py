"""Scripts written for Horovod run unchanged through `allhands launch --horovod`."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from allhands.horovod.absent import ABSENT

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]


def launch(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from allhands.cli.main import main; main()",
        "launch",
        "--horovod",
        *words,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)


@pytest.mark.parametrize(
    ("workers", "options"),
    [(2, ["--fp16-allreduce", "--gradient-predivide-factor", "2"]), (3, [])],
)
def test_mnist(workers: int, options: list[str], shared_data: Path, tmp_path: Path) -> None:
    words = ["-np", str(workers), "-H", f"localhost:{workers}", "--timeline-filename", "trace.json"]
    done = launch(
        *words,
        str(SCRIPTS / "mnist_torch.py"),
        "--data",
        str(shared_data),
        *options,
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"Test set: Average loss: [\d.]+, Accuracy: ([\d.]+)%", done.stdout)
    assert float(accuracy) > 75
    ends = re.findall(r"\[(\d)\] rank (\d) of (\d) ends with weights ([\d.]+)", done.stdout)
    assert sorted(end[0] for end in ends) == [str(rank) for rank in range(workers)]
    assert len({end[3] for end in ends}) == 1, "all ranks have the same weights"
    trace = (tmp_path / "trace.json").read_text()
    assert "NEGOTIATE_ALLREDUCE" in trace
    assert trace.endswith("{}]\n")


def test_a_lost_worker_comes_back_and_the_training_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = tmp_path / "commits"  # /dev/shm has those of other tests too
    commits.mkdir()
    monkeypatch.setenv("ALLHANDS_ELASTIC_DIR", str(commits))
    script = str(SCRIPTS / "elastic_torch.py")
    whole = launch("-np", "2", script, folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    lost = launch(
        "-np", "2", "--min-np", "2", "--reset-limit", "1", script, "--lose", "7", folder=tmp_path
    )
    assert lost.returncode == 0, lost.stderr
    assert "rank 1" in lost.stderr
    assert "killed by SIGKILL" in lost.stderr
    assert "reset: 2 workers, step 6" in lost.stdout
    ends = [
        sorted(re.findall(r"rank \d: 10 steps, weights .*", done.stdout)) for done in (whole, lost)
    ]
    assert len(ends[0]) == 2
    assert ends[0] == ends[1]
    assert list(commits.iterdir()) == []


def test_what_horovod_has_and_allhands_lacks_is_said(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    # What is below `horovod.tensorflow` needs TensorFlow.
    names = [name for name in ABSENT if "tensorflow" not in name]
    script.write_text(
        "import horovod\n"
        f"for name in {names}:\n"
        "    try:\n        __import__(name)\n"
        "    except ImportError as error:\n        print(error)\n"
        "try:\n    horovod.run(print, np=2)\nexcept ValueError as error:\n    print(error)\n"
        "from horovod.torch.mpi_ops import allreduce\n"
        "from horovod.common.exceptions import HorovodInternalError\n"
        "print(horovod.__version__, allreduce.__module__)\n"
    )
    done = launch("-np", "1", str(script), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in names:
        text = f"there is no {name!r} here: allhands has Horovod's names for torch, tensorflow and"
        assert f"{text} keras; use {ABSENT[name]}\n" in done.stdout
    assert (
        "horovod.run is not here: write `allhands launch --horovod -np 4 script.py`" in done.stdout
    )
    assert "0.28.1 allhands.horovod.torch.reductions" in done.stdout


def test_workers_have_horovods_variables(tmp_path: Path) -> None:
    names = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME"
    values = " ".join(f"$HOROVOD_{name}" for name in names.split())
    done = launch("-np", "2", "--", "sh", "-c", f"echo {values}", folder=tmp_path)
    host = socket.gethostname()
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"[{rank}] {rank} 2 {rank} 2 0 1 {host}" for rank in range(2)], done.stderr


def test_the_name_is_for_the_workers_alone(tmp_path: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('horovod'))"
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert plain.stdout.strip() == "None"
    done = launch("-np", "1", "--", "sh", "-c", f'{sys.executable} -c "{code}"', folder=tmp_path)
    assert "horovod.py" in done.stdout, done.stderr  # a Python that a worker starts has it too
