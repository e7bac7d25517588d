"""Faked environments, a row each: who would this process be, and where would it meet the others?"""

from __future__ import annotations

import pytest

from allhands.errors import AllhandsError, UserError, WorldError
from allhands.world import Layout, detect
from allhands.world.detection import find_environment
from allhands.world.environments import slurm
from allhands.world.layout import Meeting

TORCHRUN = (
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 "
    "MASTER_ADDR=h MASTER_PORT=29"
)
STEP = (
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=4 "
    "SLURM_STEP_NUM_TASKS=4"
    " SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_STEP_NODELIST=n[1-2]"
)
OMPI = (
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2"
)
HYDRA = "PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=3"


def environ(*texts: str) -> dict[str, str]:
    """`A=1 B=2`, later texts winning; `-A` removes."""
    result: dict[str, str] = {}
    for word in " ".join(texts).split():
        if word.startswith("-"):
            result.pop(word[1:], None)
        else:
            name, _, value = word.partition("=")
            result[name] = value
    return result


def layout(
    rank: int,
    size: int,
    local: int | None,
    local_size: int | None,
    node: int | None,
    nodes: int | None,
    name: str,
) -> Layout:
    return Layout(rank, size, local, local_size, node, nodes, environment=name)


def meeting_of(text: str) -> Meeting:
    environment = find_environment(environ(text))
    assert environment is not None
    return environment.meeting(environ(text), environment.layout(environ(text)))


FOUND = {
    "torchrun": (TORCHRUN, layout(5, 8, 1, 4, 1, 2, "torchrun")),
    "allhands launch": (
        TORCHRUN + " ALLHANDS_LAUNCH=1",
        layout(5, 8, 1, 4, 1, 2, "allhands launch"),
    ),
    "by hand, no local numbers": (
        "RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29",
        layout(1, 2, None, None, None, None, "torchrun"),
    ),
    "slurm": (STEP, layout(3, 4, 1, 2, 1, 2, "slurm")),
    "slurm: old name of the step": (
        STEP + " -SLURM_STEP_ID SLURM_STEPID=0",
        layout(3, 4, 1, 2, 1, 2, "slurm"),
    ),
    "slurm: uneven nodes": (
        STEP
        + " SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_NODEID=2 SLURM_PROCID=4 "
        "SLURM_LOCALID=0",
        layout(4, 5, 0, 1, 2, 3, "slurm"),
    ),
    "slurm: step smaller than its job": (
        STEP + " SLURM_NTASKS=8 SLURM_TASKS_PER_NODE=4(x2)",
        layout(3, 4, 1, 2, 1, 2, "slurm"),
    ),
    "slurm: only the job's task counts, which are not the step's": (
        STEP + " -SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE=4(x2)",
        layout(3, 4, 1, None, 1, 2, "slurm"),
    ),
    "slurm: NTASKS_PER_NODE alone": (
        STEP + " -SLURM_STEP_TASKS_PER_NODE SLURM_NTASKS_PER_NODE=2",
        layout(3, 4, 1, 2, 1, 2, "slurm"),
    ),
    "slurm: no task counts at all": (
        STEP + " -SLURM_STEP_TASKS_PER_NODE",
        layout(3, 4, 1, None, 1, 2, "slurm"),
    ),
    "slurm: WORLD_SIZE repeated by hand": (
        STEP + " WORLD_SIZE=4",
        layout(3, 4, 1, 2, 1, 2, "slurm"),
    ),
    "slurm: srun --mpi=pmi2": (STEP + " PMI_RANK=3 PMI_SIZE=4", layout(3, 4, 1, 2, 1, 2, "slurm")),
    "slurm: srun in the shell of srun --pty": (
        STEP + " SLURM_PTY_PORT=4000",
        layout(3, 4, 1, 2, 1, 2, "slurm"),
    ),
    "openmpi": (OMPI, layout(1, 2, 1, 2, 0, 1, "openmpi")),
    "openmpi: several hosts": (
        OMPI + " OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=1",
        layout(1, 4, 1, 2, None, None, "openmpi"),
    ),
    "openmpi: mpirun's daemons started by srun": (
        STEP + " SLURM_STEP_NUM_TASKS=2 " + OMPI + " OMPI_COMM_WORLD_SIZE=4",
        layout(1, 4, 1, 2, None, None, "openmpi"),
    ),
    "mpich": (HYDRA, layout(2, 3, 2, 3, 0, 1, "mpich")),
    "mpich without local numbers": (
        "PMI_RANK=0 PMI_SIZE=2",
        layout(0, 2, None, None, None, None, "mpich"),
    ),
    "mpich: daemons started by srun": (STEP + " " + HYDRA, layout(2, 3, 2, 3, 0, 1, "mpich")),
    "torchrun beats slurm": (
        STEP + " SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) " + TORCHRUN,
        layout(5, 8, 1, 4, 1, 2, "torchrun"),
    ),
    "RANK from SLURM_PROCID by hand": (
        STEP + " RANK=3 WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=29",
        layout(3, 4, None, None, None, None, "torchrun"),
    ),
}

ALONE = {
    "nothing": "HOME=/root",
    "empty variables": "RANK= WORLD_SIZE=",
    "WORLD_SIZE=1 alone": "WORLD_SIZE=1",
    "torchrun of one": TORCHRUN
    + " RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0 GROUP_WORLD_SIZE=1",
    "salloc shell": "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_NNODES=2",
    "salloc, interactive step": STEP
    + " SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4",
    "interactive step by name": STEP + " SLURM_STEP_ID=interactive",
    "sbatch script": "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0",
    "sbatch script with its step number": STEP + " SLURM_STEP_ID=4294967291",
    "srun -n 1": STEP + " SLURM_PROCID=0 SLURM_NODEID=0 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=1"
    " SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NUM_NODES=1",
}

REFUSED = {
    "RANK alone": ("RANK=1", UserError, "RANK=1 is set but WORLD_SIZE is not"),
    "WORLD_SIZE alone": ("WORLD_SIZE=4", UserError, "WORLD_SIZE=4 is set but RANK is not"),
    "rank too big": (
        TORCHRUN + " RANK=8",
        WorldError,
        "rank=8.*between 0 and 7 because world_size=8",
    ),
    "negative rank": (TORCHRUN + " RANK=-1", WorldError, "rank=-1"),
    "local rank too big": (
        TORCHRUN + " LOCAL_RANK=4",
        WorldError,
        "local_rank=4.*local_world_size=4",
    ),
    "more here than anywhere": (
        TORCHRUN + " LOCAL_WORLD_SIZE=9",
        WorldError,
        "local_world_size=9.*world_size=8",
    ),
    "no number": (
        TORCHRUN + " LOCAL_RANK=two",
        UserError,
        "LOCAL_RANK='two' is not a whole number",
    ),
    "rank is no number": ("RANK=x WORLD_SIZE=2", UserError, "RANK='x'"),
    "no master": (TORCHRUN + " -MASTER_ADDR", UserError, "MASTER_ADDR is not"),
    "no master at all": (
        TORCHRUN + " -MASTER_ADDR -MASTER_PORT",
        UserError,
        "MASTER_ADDR and MASTER_PORT are not",
    ),
    "port too big": (
        TORCHRUN + " MASTER_PORT=70000",
        UserError,
        "MASTER_PORT=70000.*between 1 and 65535",
    ),
    "slurm: tasks do not add up": (
        STEP + " SLURM_STEP_TASKS_PER_NODE=3",
        WorldError,
        "adds up to 3.*SLURM_STEP_NUM_TASKS=4",
    ),
    "slurm: WORLD_SIZE disagrees": (STEP + " WORLD_SIZE=8", WorldError, "WORLD_SIZE=8.*4 tasks"),
    "slurm: unreadable host list": (
        STEP + " SLURM_STEP_NODELIST=n[1-",
        UserError,
        "not a Slurm host list",
    ),
    "slurm: no host list": (
        STEP + " -SLURM_STEP_NODELIST",
        UserError,
        "SLURM_STEP_NODELIST is not set",
    ),
    "one torchrun world in each task": (
        STEP + " " + TORCHRUN + " GROUP_WORLD_SIZE=1 GROUP_RANK=0",
        WorldError,
        "SLURM_STEP_NUM_TASKS=4.*GROUP_WORLD_SIZE=1",
    ),
    "openmpi: no size": (
        OMPI + " -OMPI_COMM_WORLD_SIZE",
        UserError,
        "OMPI_COMM_WORLD_SIZE is not set",
    ),
    "openmpi: WORLD_SIZE disagrees": (
        OMPI + " WORLD_SIZE=3",
        WorldError,
        "WORLD_SIZE=3.*OMPI_COMM_WORLD_SIZE=2",
    ),
    "openmpi: hosts cannot meet": (
        OMPI + " OMPI_COMM_WORLD_SIZE=4",
        WorldError,
        r"allhands\[mpi\].*MASTER_ADDR",
    ),
    "mpich: rank too big": (HYDRA + " PMI_RANK=3", WorldError, "rank=3"),
}


@pytest.fixture(autouse=True)
def _no_terminal_no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "has_terminal", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.parametrize(("text", "expected"), FOUND.values(), ids=FOUND)
def test_finds(text: str, expected: Layout) -> None:
    assert detect(environ(text)) == expected


@pytest.mark.parametrize("text", ALONE.values(), ids=ALONE)
def test_is_alone(text: str) -> None:
    assert detect(environ(text)) is None


@pytest.mark.parametrize(("text", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(text: str, kind: type[AllhandsError], message: str) -> None:
    with pytest.raises(kind, match=message):
        meeting_of(text)


def test_the_shell_of_srun_pty_is_alone_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slurm, "has_terminal", lambda: True)
    assert detect(environ(STEP, "SLURM_PTY_PORT=4000")) is None
    assert "srun --pty started 4 tasks" in caplog.text


def test_slurm_hosts_and_key_are_the_same_on_every_rank_and_differ_between_steps() -> None:
    rank_0 = meeting_of(STEP + " SLURM_PROCID=0 SLURM_NODEID=0 SLURM_LOCALID=0")
    assert rank_0 == meeting_of(STEP)
    assert rank_0.hosts == ("n1", "n2")
    assert rank_0.port is None
    assert rank_0 != meeting_of(STEP + " SLURM_STEP_ID=1")


def test_master_variables_are_believed_everywhere() -> None:
    for text in (STEP, OMPI + " OMPI_COMM_WORLD_SIZE=4", HYDRA):
        meeting = meeting_of(text + " MASTER_ADDR=head MASTER_PORT=4242")
        assert (meeting.hosts, meeting.port) == (("head",), 4242)


def test_master_addr_alone_says_where_the_beacon_is() -> None:
    assert meeting_of(STEP + " MASTER_ADDR=n2").hosts == ("n2",)


def test_the_launchers_store_is_kept_apart_for_each_attempt() -> None:
    meeting = meeting_of(
        TORCHRUN + " TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2"
    )
    assert (meeting.agent_store, meeting.attempt) == (True, 2)
