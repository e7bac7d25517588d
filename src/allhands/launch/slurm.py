"""Jobs under Slurm: agents on the nodes of an allocation, through srun, and the submission of a
job that will have one."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from allhands.errors import UserError
from allhands.launch import processes
from allhands.launch.handle import AgentHandle
from allhands.launch.output import show
from allhands.launch.remote import agent_message, agent_words, await_agent, start_process
from allhands.world import expand_hosts
from allhands.world.environments.slurm import check_tasks
from allhands.world.hostlist import expand_tasks
from allhands.world.layout import read_int


class SlurmNode:
    """One node of the allocation around this process. Its agent is a job step of its own with all
    that the job has there.

    Args:
        name: of the node.
        python: path of the Python interpreter there.
        env: variables for all workers there, besides those of this process, which srun takes along.
        cpus: how many the job has on the node.
    """

    local = False

    def __init__(
        self, name: str, python: str, env: Mapping[str, str | None], cpus: int | None
    ) -> None:
        self.name = name
        self._python, self._env, self._cpus = python, dict(env), cpus

    def start(self) -> AgentHandle:
        """Start an agent on the node.

        Raises:
            HostError: srun could not start it there, there is no such Python, or it lacks allhands.
        """
        words = [
            _program("srun"),
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={self.name}",
            "--overlap",
            "--unbuffered",
            "--export=ALL",
        ]
        # Left to itself, a step of one task gets one CPU.
        words += [f"--cpus-per-task={self._cpus}"] if self._cpus else []
        # Sizes that the job was asked for would contradict the step's.
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_SIZES)}
        process = start_process(
            [*words, *agent_words(self._python)], agent_message(self._env), environ
        )
        return await_agent(process, self.name, self._python)

    def close(self) -> None:
        """Nothing has to be let go of: the step ends with the agent."""


# What srun would read as options of its own.
_SIZES = (
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_NNODES",
    "SLURM_GPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_CPU_BIND",
    "SLURM_GPU_BIND",
    "SLURM_INPUTMODE",
    "SLURM_STDINMODE",
    "SLURM_OUTPUTMODE",
    "SLURM_STDOUTMODE",
    "SLURM_LABELIO",
    "SLURM_KILL_BAD_EXIT",
)


@dataclass(frozen=True)
class Allocation:
    """What Slurm gave the job around this process.

    Attributes:
        nodes: their names.
        slots: the tasks on each that the job was asked for; None where nobody said, and the GPUs or
            cores decide.
        cpus: on each node, where Slurm tells.
    """

    nodes: list[str]
    slots: list[int | None]
    cpus: list[int | None]


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation around this process; None outside of one.

    Raises:
        UserError: Slurm's variables contradict one another, or this process is one of several
            tasks.
    """
    if not environ.get("SLURM_JOB_ID"):
        return None
    if int(environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        raise UserError(
            f"--launcher slurm in one of {environ['SLURM_STEP_NUM_TASKS']} tasks of srun: write "
            "`srun python script.py`, or start `allhands launch --launcher slurm` once, from the "
            "script of sbatch or the shell of salloc"
        )
    nodes = expand_hosts(environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", ""))
    if not nodes:
        raise UserError(
            "SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not; start this inside salloc or sbatch"
        )
    check_tasks(environ, read_int(environ, "SLURM_NTASKS"), len(nodes))
    slots: list[int | None] = [None] * len(nodes)
    # SLURM_TASKS_PER_NODE alone is 1 a node when nobody asked for tasks.
    if any(environ.get(name) for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE")):
        slots = [*_counts(environ, "SLURM_TASKS_PER_NODE", len(nodes))]
    return Allocation(nodes, slots, _counts(environ, "SLURM_JOB_CPUS_PER_NODE", len(nodes)))


def _counts(environ: Mapping[str, str], name: str, nodes: int) -> list[int | None]:
    text = environ.get(name, "")
    counts = expand_tasks(text) if text else []
    if counts and len(counts) != nodes:
        raise UserError(
            f"{name}={text!r} is about {len(counts)} nodes, but the job has {nodes}; unset "
            "whichever was set by hand"
        )
    return [*counts] if counts else [None] * nodes


def submit(
    arguments: Sequence[str], workers: int | None, options: Sequence[str], wait: bool
) -> int:
    """Put a job into Slurm's queue that runs `allhands launch` with the same arguments.

    Args:
        arguments: of `allhands launch`.
        workers: how many tasks to ask for, unless `options` do.
        options: for sbatch.
        wait: return only when the job has ended, with its exit code.

    Raises:
        UserError: there is no sbatch, or it refuses, or two sizes contradict each other.
    """
    sized = any(re.match(r"-[nN]|--(ntasks|nodes|ntasks-per-node)\b", option) for option in options)
    if not sized and workers is None:
        raise UserError(
            "--launcher slurm outside of an allocation submits a job, and nobody said how large: "
            "write -n WORKERS, or "
            '--sbatch "--nodes=2 --ntasks-per-node=4 …"'
        )
    _check_sizes(options, workers)
    size = [] if sized else [f"--ntasks={workers}"]
    name = os.environ.get("SLURM_JOB_NAME") or "allhands"
    words = [
        _program("sbatch"),
        "--parsable",
        f"--job-name={name}",
        "--output=slurm-%j.out",
        *size,
        *options,
    ]
    words += ["--wait"] if wait else []
    # exec: what Slurm signals is then the launcher, which passes it on, and not a shell that dies
    # of it.
    run = [
        sys.executable,
        "-P",
        "-c",
        "from allhands.cli.main import main; main()",
        "launch",
        *arguments,
    ]
    script = f"#!/bin/sh\nexec {shlex.join(run)}\n"
    with tempfile.TemporaryFile("w+") as said:
        parent = os.getpid()
        sbatch = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            preexec_fn=lambda: processes.die_with_parent(parent),  # noqa: PLW1509
        )
        assert sbatch.stdin is not None
        assert sbatch.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            sbatch.stdin.write(script)
            sbatch.stdin.close()
        job = sbatch.stdout.readline().strip().partition(";")[0]
        if not job:
            sbatch.wait()
            said.seek(0)
            raise UserError(f"sbatch refuses ({shlex.join(words[1:])}): {said.read().strip()}")
    output = Path(f"slurm-{job}.out")
    print(
        f"allhands: submitted job {job}; what it prints is in {output}", file=sys.stderr, flush=True
    )
    try:
        return _follow(sbatch, output) if wait else sbatch.wait()
    except KeyboardInterrupt:
        print(f"allhands: job {job} goes on; `scancel {job}` ends it", file=sys.stderr, flush=True)
        raise


def _check_sizes(options: Sequence[str], workers: int | None) -> None:
    """Raise `UserError` for sizes of which Slurm would drop one: it only warns, in the job's
    output."""
    tasks, nodes = _size(options, "--ntasks", "-n"), _size(options, "--nodes", "-N")
    each, gpus, per_task = (
        _size(options, "--ntasks-per-node"),
        _size(options, "--gpus", "-G"),
        _size(options, "--gpus-per-task"),
    )
    product = nodes * each if nodes and each else None
    told = tasks or product
    how = (
        f"--ntasks={tasks}" if tasks else f"--nodes={nodes} x --ntasks-per-node={each} = {product}"
    )
    if tasks and product and tasks > product:
        raise UserError(
            f"--sbatch: --ntasks={tasks}, but --nodes={nodes} x --ntasks-per-node={each} = "
            f"{product}; Slurm would drop one of them: leave --ntasks out, or make them agree"
        )
    if workers is not None and told and workers != told:
        raise UserError(
            f"-n {workers} workers, but --sbatch asks for {told} tasks ({how}); leave one of them "
            "out, or make them agree"
        )
    if told and gpus and per_task and gpus != told * per_task:
        raise UserError(
            f"--sbatch: --gpus={gpus}, but {told} tasks ({how}) x --gpus-per-task={per_task} = "
            f"{told * per_task}; leave one of them out, or make them agree"
        )


def _size(options: Sequence[str], name: str, short: str | None = None) -> int | None:
    """The number that an option of sbatch has, the last one that is given; None where it has none,
    or a range."""
    found = None
    for option, following in zip(options, [*options[1:], ""], strict=True):
        text = None
        if option in (name, short):
            text = following
        elif option.startswith(f"{name}="):
            text = option.partition("=")[2]
        elif short and option.startswith(short) and not option.startswith("--"):
            text = option[len(short) :].removeprefix("=")
        if text is not None:
            found = int(text) if text.isdecimal() else None
    return found


def _follow(sbatch: subprocess.Popen[str], output: Path) -> int:
    """Show what the job writes until it has ended; its exit code."""
    seen = 0
    while True:
        code = sbatch.poll()
        if output.exists():
            with output.open("rb") as file:
                file.seek(seen)
                data = file.read()
            seen += len(data)
            show(sys.stdout, data)
        if code is not None:
            return code
        time.sleep(0.5)


def _program(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        raise UserError(
            f"there is no {name} on this machine: --launcher slurm works on a cluster's login node "
            "and in its jobs"
        )
    return program
