"""`allhands launch --launcher slurm`: agents on the nodes of an allocation, jobs that are
submitted, and what breaks."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.launching import STEPS, WORKER_FAILURES, Launch, shared_folder
from tests.cluster.slurm import Slurm
from tests.patience import patience

pytestmark = pytest.mark.usefixtures("forked_python")

ALLOCATION = ("salloc", "--quiet", "--nodes=2")

PROBE = """
import json, os, sys
import torch, torch.distributed as dist
import allhands

world = allhands.init()
total = torch.tensor([world.rank + 1.0])
dist.all_reduce(total)
print(json.dumps({"rank": world.rank, "local": world.local_rank, "sum": total.item(),
                  "argv": sys.argv[1:]}))
"""


def prepared(slurm: Slurm) -> Path:
    folder = shared_folder(slurm, "launcher")
    (folder / "steps.py").write_text(STEPS)
    (folder / "probe.py").write_text(PROBE)
    return folder


def test_inside_an_allocation_workers_are_the_tasks_that_were_asked_for(slurm: Slurm) -> None:
    folder = prepared(slurm)
    within = ("salloc", "--quiet", "--nodes=2", "--ntasks=3")
    with Launch(
        slurm, folder, "--launcher", "slurm", "-s", "1", "probe.py", "a b", "$X", within=within
    ) as job:
        code, said = job.end()
    assert code == 0, said
    told = job.told()
    assert [one["place"] for one in told] == ["d1 0", "d1 1", "d2 2"], said
    assert [(one["local"], one["sum"], one["argv"]) for one in told] == [
        (local, 6.0, ["a b", "$X"]) for local in (0, 1, 0)
    ]
    assert slurm.left(5) == []


@pytest.mark.parametrize(
    ("how", "cause", "code"),
    [
        failure if failure[0] == "kill" else pytest.param(*failure, marks=pytest.mark.rare)
        for failure in WORKER_FAILURES
    ],
)
def test_a_worker_fails(slurm: Slurm, how: str, cause: str, code: int) -> None:
    with Launch(
        slurm, prepared(slurm), "-n", "2", "--launcher", "slurm", "steps.py", how, within=ALLOCATION
    ) as job:
        job.names_the_failure(cause, code)
    assert slurm.left(5) == []


# rare: test_ssh_failures.py switches a host off, and srun is killed in the test above.
@pytest.mark.rare
def test_a_node_is_cut_off(slurm: Slurm) -> None:
    words = ["-n", "2", "--launcher", "slurm", "--host-timeout", "4", "steps.py", "no"]
    with Launch(slurm, prepared(slurm), *words, within=ALLOCATION) as job:
        job.until("running")
        slurm.hosts.cut("d2")
        code, said = job.end()
    assert code == 128 + 9, said
    assert "rank 1 (d2, pid " in said
    assert "no word from host d2" in said
    deadline = time.monotonic() + patience(8)
    while [
        one for one in slurm.hosts.processes("d2") if "python" in one
    ] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [one for one in slurm.hosts.processes("d2") if "python" in one] == []
    slurm.hosts.heal("d2")


def test_a_submitted_job_passes_its_arguments_output_and_exit_code(slurm: Slurm) -> None:
    folder = prepared(slurm)
    words = ["--launcher", "slurm", "-n", "2", "--sbatch", "--nodes=2", "--wait"]
    with Launch(slurm, folder, *words, "probe.py", "it's", "a  b", "--wait") as job:
        code, said = job.end()
    assert code == 0, said
    assert [one["argv"] for one in job.told()] == [["it's", "a  b", "--wait"]] * 2
    assert re.search(r"submitted job \d+; what it prints is in slurm-\d+.out", said)
    with Launch(slurm, folder, *words, "steps.py", "exit") as job:
        code, said = job.end()
    assert code == 3, said
    assert "rank 1 (d2, pid " in said
    with Launch(slurm, folder, "--launcher", "slurm", "probe.py") as job:
        code, said = job.end()
    assert code == 2
    assert "nobody said how large: write -n WORKERS" in said
    with Launch(
        slurm, folder, "--launcher", "slurm", "--sbatch", "--partition=absent -n 2", "probe.py"
    ) as job:
        code, said = job.end()
    assert code == 2
    assert "sbatch refuses" in said
    assert "invalid partition" in said
    assert slurm.left(5) == []


def test_a_cancelled_job_leaves_nothing(slurm: Slurm) -> None:
    words = ["--launcher", "slurm", "-n", "2", "--sbatch", "--nodes=2", "--wait", "steps.py", "no"]
    with Launch(slurm, prepared(slurm), *words) as job:
        job.until("running")
        found = re.search(r"submitted job (\d+)", job.said)
        assert found
        slurm.command("scancel", found[1])
        code, said = job.end()
    assert code == 128 + signal.SIGTERM, said
    assert slurm.left(8) == []
