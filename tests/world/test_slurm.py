"""Steps, shells and scripts of Slurm as a real Slurm sets their variables, a row each;
`slurm.setup`; jobs that run again."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from allhands import slurm
from allhands.errors import UserError, WorldError
from allhands.world import detect, expand_hosts
from allhands.world.devices import pick_device
from tests.world.test_environments import environ, layout, meeting_of

pytestmark = pytest.mark.usefixtures("forked_python")

# `srun -n 3` on two nodes, rank 2, as Slurm 22.05 sets it. --ntasks-per-node sets
# SLURM_NTASKS_PER_NODE; nothing else does.
UNEVEN = (
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=3 "
    "SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NUM_NODES=2 SLURM_NNODES=2 SLURM_TASKS_PER_NODE=2,1 "
    "SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_STEP_NODELIST=d[1-2] SLURM_JOB_NODELIST=d[1-2] "
    "SLURM_CLUSTER_NAME=c SLURM_JOB_UID=0"
)
EVEN = (
    UNEVEN + " SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_TASKS_PER_NODE=2(x2) "
    "SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_PROCID=3"
    " SLURM_LOCALID=1"
)
ONE_EACH = (
    UNEVEN + " SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_TASKS_PER_NODE=1(x2) "
    "SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=1"
)
# The variables, the layout, how many GPUs the task sees, its device.
ROWS: dict[str, tuple[str, tuple[int, ...], int, str]] = {
    "heterogeneous nodes, last rank": (UNEVEN, (2, 3, 0, 1, 1, 2), 2, "cuda:0"),
    "heterogeneous nodes, second rank": (
        UNEVEN + " SLURM_PROCID=1 SLURM_NODEID=0 SLURM_LOCALID=1",
        (1, 3, 1, 2, 0, 2),
        2,
        "cuda:1",
    ),
    "--ntasks-per-node": (EVEN + " SLURM_NTASKS_PER_NODE=2", (3, 4, 1, 2, 1, 2), 2, "cuda:1"),
    "--gres=gpu:2, all visible to every task": (
        EVEN + " CUDA_VISIBLE_DEVICES=0,1",
        (3, 4, 1, 2, 1, 2),
        2,
        "cuda:1",
    ),
    "--gpus-per-task=1": (
        EVEN + " CUDA_VISIBLE_DEVICES=1 SLURM_GPUS_ON_NODE=2",
        (3, 4, 1, 2, 1, 2),
        1,
        "cuda:0",
    ),
    "--gpu-bind=single:1": (
        EVEN + " CUDA_VISIBLE_DEVICES=1 SLURM_GPU_BIND=single:1",
        (3, 4, 1, 2, 1, 2),
        1,
        "cuda:0",
    ),
    "one task a node": (ONE_EACH, (1, 2, 0, 1, 1, 2), 2, "cuda:0"),
    "srun in the shell of salloc": (
        EVEN + " SLURM_JOB_NAME=interactive SLURM_STEP_ID=3",
        (3, 4, 1, 2, 1, 2),
        2,
        "cuda:1",
    ),
    "srun in a script of sbatch, fewer tasks than the job": (
        ONE_EACH + " SLURM_NTASKS=8 SLURM_NPROCS=8 SLURM_JOB_NUM_NODES=4 SLURM_JOB_NODELIST=d[1-4]",
        (1, 2, 0, 1, 1, 2),
        4,
        "cuda:0",
    ),
    "a task of a job array": (
        EVEN
        + " SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=1 SLURM_ARRAY_TASK_COUNT=2 SLURM_JOB_ID=8",
        (3, 4, 1, 2, 1, 2),
        2,
        "cuda:1",
    ),
    "heterogeneous job, one step over both parts": (
        UNEVEN
        + " SLURM_HET_SIZE=2 SLURM_STEP_TASKS_PER_NODE=1,2 SLURM_TASKS_PER_NODE=1,2 SLURM_LOCALID=1"
        " SLURM_JOB_ID_PACK_GROUP_0=7 SLURM_JOB_ID_PACK_GROUP_1=8",
        (2, 3, 1, 2, 1, 2),
        2,
        "cuda:1",
    ),
    "zeros in the names of the nodes": (
        EVEN + " SLURM_STEP_NODELIST=gpu[007-008]",
        (3, 4, 1, 2, 1, 2),
        2,
        "cuda:1",
    ),
    "arbitrary distribution": (
        UNEVEN + " SLURM_DISTRIBUTION=arbitrary SLURM_PROCID=0",
        (0, 3, 0, 1, 1, 2),
        2,
        "cuda:0",
    ),
}


@pytest.mark.parametrize(("text", "numbers", "gpus", "device"), ROWS.values(), ids=ROWS)
def test_ranks_and_device(
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    numbers: tuple[int, int, int, int, int, int],
    gpus: int,
    device: str,
) -> None:
    found = detect(environ(text))
    assert found == layout(*numbers, "slurm")
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    assert found.local_rank is not None
    assert str(pick_device("cuda", found.local_rank, gpus)) == device
    assert made_current == [torch.device(device)]


def test_the_hosts_of_a_step_and_the_key_of_its_array_task() -> None:
    assert meeting_of(ROWS["zeros in the names of the nodes"][0]).hosts == ("gpu007", "gpu008")
    assert expand_hosts("r[01-02]n[1,3],head") == ["r01n1", "r01n3", "r02n1", "r02n3", "head"]
    task = ROWS["a task of a job array"][0]
    assert (
        meeting_of(task).job_key
        != meeting_of(task + " SLURM_JOB_ID=9 SLURM_ARRAY_TASK_ID=2").job_key
    )
    assert meeting_of(task).job_key != meeting_of(task + " SLURM_RESTART_COUNT=1").job_key


NODE_TASKS = {
    "one task a node": (ONE_EACH, True),
    "one task on each of three nodes": (
        UNEVEN + " SLURM_STEP_TASKS_PER_NODE=1(x3) SLURM_STEP_NUM_NODES=3 SLURM_PROCID=2",
        True,
    ),
    "several on a node": (EVEN, False),
    "uneven": (UNEVEN, False),
    "a single task": (
        ONE_EACH + " SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NUM_NODES=1 "
        "SLURM_PROCID=0 SLURM_NODEID=0",
        False,
    ),
    "torchrun below the task": (
        ONE_EACH + " RANK=1 WORLD_SIZE=2 MASTER_ADDR=d1 MASTER_PORT=29",
        False,
    ),
    "a script of sbatch": (ONE_EACH + " -SLURM_STEP_ID", False),
    "nothing": ("HOME=/root", False),
}


@pytest.mark.parametrize(("text", "is_one"), NODE_TASKS.values(), ids=NODE_TASKS)
def test_a_task_that_has_its_node_to_itself(text: str, is_one: bool) -> None:
    assert (slurm.node_task(environ(text)) is not None) == is_one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("HOME=/root", "no Slurm job around this process.*srun -N 2.*allhands.init"),
        (
            "SLURM_JOB_ID=7 SLURM_NTASKS=4",
            "job 7, but not in a task of srun.*srun python script.py",
        ),
        (EVEN + " SLURM_STEP_ID=batch", "job 7, but not in a task of srun"),
        (EVEN + " -SLURM_LOCALID", "SLURM_LOCALID is not set"),
    ],
)
def test_setup_outside_of_a_step_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        slurm._set_up(environ(text), None)


@pytest.mark.parametrize("port", [0, 70000, True, "23344"])
def test_setup_refuses_what_is_no_port(port: Any) -> None:
    with pytest.raises(UserError, match="port must be between 1 and 65535"):
        slurm.setup(port=port)


def test_setup_believes_master_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert slurm._set_up(
        environ(EVEN, "MASTER_ADDR=head MASTER_PORT=4242 GLOO_SOCKET_IFNAME=eth7"), None
    ) == (
        3,
        1,
        4,
        "tcp://head:4242",
    )


# ---------------------------------------------------------------------- jobs that run again

SHOWN = """JobId=9 JobName=x JobState=CANCELLED Reason=None Dependency=(null)
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag={batch} Reboot=0 ExitCode=0:0
"""


class Scontrol:
    """Stands for the program, and keeps what it was asked for."""

    def __init__(self, **shown: Any) -> None:
        self.shown = SHOWN.format(
            **{"state": "RUNNING", "reason": "None", "restarts": 0, "batch": 1} | shown
        )
        self.asked: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.asked.append(command)
        return subprocess.CompletedProcess(
            command, 0, self.shown if command[1] == "show" else "", ""
        )


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("shown", "said", "asks"),
    [
        ({}, "requeued job 9", True),
        ({"state": "COMPLETING", "reason": "TimeLimit"}, "requeued job 9", True),
        ({"state": "COMPLETING", "restarts": 1}, "Slurm has requeued job 9 already", False),
        (
            {"state": "COMPLETING"},
            "job 9 is being cancelled (COMPLETING), so it was not requeued",
            False,
        ),
        (
            {"state": "CANCELLED"},
            "job 9 is being cancelled (CANCELLED), so it was not requeued",
            False,
        ),
    ],
)
def test_requeue_happens_once_and_not_against_a_cancellation(
    job: pytest.MonkeyPatch, shown: dict[str, Any], said: str, asks: bool
) -> None:
    scontrol = Scontrol(**shown)
    job.setattr(subprocess, "run", scontrol)
    assert slurm.requeue() == said
    assert (["scontrol", "requeue", "9"] in scontrol.asked) == asks


def test_requeue_counts_from_the_restarts_that_this_process_has_seen(
    job: pytest.MonkeyPatch,
) -> None:
    job.setenv("SLURM_RESTART_COUNT", "1")
    job.setattr(subprocess, "run", Scontrol(restarts=1))
    assert slurm.requeue() == "requeued job 9"


def test_requeue_says_why_it_cannot(job: pytest.MonkeyPatch) -> None:
    job.setattr(subprocess, "run", Scontrol(batch=0))
    with pytest.raises(WorldError, match="job 9 was started by srun or salloc.*sbatch"):
        slurm.requeue()

    def absent(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    job.setattr(subprocess, "run", absent)
    with pytest.raises(WorldError, match="scontrol show job 9.*no program scontrol"):
        slurm.requeue()
    job.delenv("SLURM_JOB_ID")
    with pytest.raises(UserError, match="SLURM_JOB_ID is not set"):
        slurm.requeue()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", False), ("ALLHANDS_REQUEUE=0", False), ("SLURM_JOB_ID=9 ALLHANDS_REQUEUE=1", True)],
)
def test_whether_a_requeue_is_wanted(text: str, wanted: bool) -> None:
    assert slurm.wants_requeue(environ(text)) is wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ALLHANDS_REQUEUE=yes SLURM_JOB_ID=9", "must be 1.*or 0"),
        ("ALLHANDS_REQUEUE=1", "no Slurm job around this process"),
    ],
)
def test_a_wrong_wish_for_a_requeue_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        slurm.wants_requeue(environ(text))
