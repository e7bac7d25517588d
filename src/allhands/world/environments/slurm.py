"""A step that srun started.

What is *not* such a step, although Slurm's variables are there: the shell that salloc opens (no
SLURM_PROCID, or the step "interactive", whose number is 0xfffffffa), the script that sbatch runs
(no SLURM_STEP_ID, or the step "batch", 0xfffffffb), and the shell of `srun --pty bash`
(SLURM_PTY_PORT is set and the process has a terminal; the terminal matters because an srun typed in
that shell inherits SLURM_PTY_PORT, and its tasks have none). A program there trains alone.
"""

from __future__ import annotations

import logging

from allhands.errors import UserError, WorldError
from allhands.world.environments.base import Environment
from allhands.world.hostlist import expand_hosts, expand_tasks
from allhands.world.layout import (
    Environ,
    Layout,
    Meeting,
    given_meeting,
    need_int,
    read_int,
    read_port,
)

_log = logging.getLogger(__name__)
# Batch, extern, interactive and pending steps are numbered from the top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_SPECIAL_STEPS = {"batch", "extern", "interactive"}


class Slurm(Environment):
    """SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_LOCALID say who we are; rank 0's host is a host
    of the step's list.
    """

    name = "slurm"

    def detected(self, environ: Environ) -> bool:
        return is_step(environ) and not _daemon_of_mpirun(environ) and not _terminal_shell(environ)

    def layout(self, environ: Environ) -> Layout:
        because = "this process is a task that srun started"
        rank = need_int(environ, "SLURM_PROCID", because)
        tasks = _step_tasks(environ)
        if tasks is None:
            raise UserError(
                f"neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS is set, but {because}; pass rank= "
                "and world_size=."
            )
        told = read_int(environ, "WORLD_SIZE")
        if told is not None and told != tasks:
            raise WorldError(
                f"WORLD_SIZE={told}, but srun started {tasks} tasks: start `srun --ntasks={told}`, "
                "or unset WORLD_SIZE."
            )
        node = read_int(environ, "SLURM_NODEID")
        counts = self._tasks_per_node(environ, tasks)
        local_size = (
            counts[node] if counts is not None and node is not None and node < len(counts) else None
        )
        return Layout(
            rank=rank,
            world_size=tasks,
            local_rank=read_int(environ, "SLURM_LOCALID"),
            local_world_size=local_size,
            node_rank=node,
            num_nodes=len(counts) if counts is not None else _num_nodes(environ),
            environment=self.name,
        )

    def meeting(self, environ: Environ, layout: Layout) -> Meeting:
        given = given_meeting(environ)
        if given is not None:
            return given
        node_list = (
            environ.get("SLURM_STEP_NODELIST")
            or environ.get("SLURM_JOB_NODELIST")
            or environ.get("SLURM_NODELIST")
        )
        if layout.one_host:
            hosts: tuple[str, ...] = ("127.0.0.1",)
        elif node_list:
            hosts = tuple(expand_hosts(node_list))
        else:
            raise UserError(
                "SLURM_STEP_NODELIST is not set; set MASTER_ADDR to the host of rank 0."
            )
        # On one host only the loopback is listened on.
        if environ.get("MASTER_ADDR", "").strip() and not layout.one_host:
            hosts = (environ["MASTER_ADDR"].strip(),)
        # The restart count keeps a requeued job from meeting what is left of its former self.
        names = (
            "SLURM_CLUSTER_NAME",
            "SLURM_JOB_ID",
            "SLURM_STEP_ID",
            "SLURM_JOB_UID",
            "SLURM_RESTART_COUNT",
        )
        key = "slurm " + " ".join(environ.get(name, "-") for name in names)
        return Meeting(hosts, read_port(environ), job_key=key)

    @staticmethod
    def _tasks_per_node(environ: Environ, tasks: int) -> list[int] | None:
        """Tasks on each node of the step, or None where Slurm does not tell; checked against their
        sum."""
        text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
        if not text:
            nodes, each = _num_nodes(environ), read_int(environ, "SLURM_NTASKS_PER_NODE")
            check_tasks(environ, tasks, nodes)
            return [each] * nodes if nodes and each and nodes * each == tasks else None
        counts = expand_tasks(text)
        if sum(counts) == tasks:
            return counts
        if not environ.get("SLURM_STEP_TASKS_PER_NODE"):
            # the variable is the allocation's: a step may use fewer nodes or tasks than its job
            return None
        raise WorldError(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} adds up to {sum(counts)} tasks, but "
            f"SLURM_STEP_NUM_TASKS={tasks}. Unset whichever was set by hand."
        )


def check_tasks(environ: Environ, tasks: int | None, nodes: int | None) -> None:
    """Raise `UserError` where there are more tasks than ``--ntasks-per-node`` lets the nodes
    have."""
    each = read_int(environ, "SLURM_NTASKS_PER_NODE")
    if tasks and nodes and each and tasks > nodes * each:
        raise UserError(
            f"Slurm's variables say {tasks} tasks, but SLURM_NTASKS_PER_NODE={each} on {nodes} "
            f"node{'s' if nodes > 1 else ''} makes {nodes * each}. Unset whichever was set by "
            "hand, or make --ntasks and --nodes x --ntasks-per-node agree."
        )


def is_step(environ: Environ) -> bool:
    """Whether srun started this process as a task (of any size), rather than salloc or sbatch as a
    shell."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "")).strip()
    if not step or not environ.get("SLURM_PROCID", "").strip() or step in _SPECIAL_STEPS:
        return False
    return not (step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP)


def cpus_of_task(environ: Environ) -> int | None:
    """The CPUs that Slurm gives this task: those of ``--cpus-per-task``, or its part of the step's
    on this node. None where this process is no task, or Slurm does not tell."""
    if not is_step(environ):
        return None
    each = read_int(environ, "SLURM_CPUS_PER_TASK")
    on_node = read_int(environ, "SLURM_CPUS_ON_NODE")
    if each is not None or on_node is None:
        return each
    tasks = Slurm().layout(environ).local_world_size
    return max(1, on_node // tasks) if tasks else None


def _step_tasks(environ: Environ) -> int | None:
    tasks = read_int(environ, "SLURM_STEP_NUM_TASKS")
    return tasks if tasks is not None else read_int(environ, "SLURM_NTASKS")


def _num_nodes(environ: Environ) -> int | None:
    nodes = read_int(environ, "SLURM_STEP_NUM_NODES")
    return nodes if nodes is not None else read_int(environ, "SLURM_NNODES")


def _daemon_of_mpirun(environ: Environ) -> bool:
    """mpirun starts its daemons with srun, so that its ranks see the daemon's task number. MPI's
    own numbers count then.

    `srun --mpi=pmi2` sets PMI_RANK as well, but equal to Slurm's number.
    """
    if environ.get("OMPI_COMM_WORLD_RANK", "").strip():
        return True
    rank, size = environ.get("PMI_RANK", "").strip(), environ.get("PMI_SIZE", "").strip()
    if not rank or not size:
        return False
    slurm_size = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "")).strip()
    return (rank, size) != (environ["SLURM_PROCID"].strip(), slurm_size)


def _terminal_shell(environ: Environ) -> bool:
    if not environ.get("SLURM_PTY_PORT") or not has_terminal():
        return False
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        _log.warning(
            "srun --pty started %s tasks; this program runs in the shell of the first of them and "
            "trains alone. Start it with srun, without --pty, to use them all.",
            tasks,
        )
    return True


def has_terminal() -> bool:
    """Whether this process has a controlling terminal, whatever its streams are redirected to."""
    try:
        with open("/dev/tty", "rb"):
            return True
    except OSError:
        return False
