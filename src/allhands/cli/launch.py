"""`allhands launch`: run a script, module or program in several workers, here or on other hosts."""

from __future__ import annotations

import enum
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from allhands.errors import UserError, nearest
from allhands.launch import horovod_alias as alias
from allhands.launch.hosts import read_hosts
from allhands.launch.job import Job
from allhands.launch.job_nodes import Host
from allhands.launch.local import LocalHost
from allhands.launch.mpi import run_mpi
from allhands.launch.options import Options
from allhands.launch.plan import Command
from allhands.launch.processes import cores, gpus
from allhands.launch.protocol import MARK
from allhands.launch.recovery import CONTINUE, RESTART, STOP
from allhands.launch.slurm import SlurmNode, allocation, submit
from allhands.launch.ssh import SshHost


class OnWorkerFailure(enum.StrEnum):
    """What follows the failure of a worker."""

    stop = STOP
    go_on = CONTINUE
    restart = RESTART


class Launcher(enum.StrEnum):
    """What starts the workers."""

    local = "local"
    ssh = "ssh"
    slurm = "slurm"
    mpi = "mpi"


def launch(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]",
            help="A Python script, or any program, with its arguments, options included.",
            show_default=False,
        ),
    ] = None,
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            help="How many workers in all. Default: one for each GPU, or for each core without "
            "GPUs.",
        ),
    ] = None,
    servers: Annotated[
        int,
        typer.Option(
            "--servers", "-s", help="How many parameter servers beside them, one a host in turn."
        ),
    ] = 0,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts", "-H", help="A file with one host a line, or a list: d1,d2. See docs/ssh.md."
        ),
    ] = None,
    launcher: Annotated[
        Launcher | None,
        typer.Option(help="What starts the workers. Default: ssh with --hosts, else local."),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as for python -m.")
    ] = False,
    log_dir: Annotated[
        Path | None, typer.Option(help="Also write each worker's output to a file in this folder.")
    ] = None,
    prefix: Annotated[
        bool, typer.Option(help="Start each line of output with the rank that wrote it.")
    ] = True,
    grace: Annotated[
        float, typer.Option(help="Seconds to save and end for workers that are asked to stop.")
    ] = 5.0,
    heartbeat_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without a sign of life after which a worker has failed; 0 waits for ever."
        ),
    ] = 60.0,
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads for each worker. Default: OMP_NUM_THREADS, or the cores shared out "
            "evenly."
        ),
    ] = None,
    preload: Annotated[
        bool, typer.Option(help="Import torch once for all workers, not once in each.")
    ] = True,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="How many times to start all workers again after a failure; they resume from "
            "their checkpoint."
        ),
    ] = 0,
    server_restarts: Annotated[
        int,
        typer.Option(
            help="How many times to start a parameter server again that died, while the workers "
            "run on."
        ),
    ] = 0,
    on_worker_failure: Annotated[
        OnWorkerFailure,
        typer.Option(
            help="With --servers: the others go on without a worker that fails, or it alone is "
            "started again, up to "
            "--max-restarts times."
        ),
    ] = OnWorkerFailure.stop,
    min_workers: Annotated[
        int | None,
        typer.Option(
            help="Restart without hosts that do not come back, as long as so many workers are left."
        ),
    ] = None,
    rejoin_timeout: Annotated[
        float, typer.Option(help="Seconds for a lost host to come back.")
    ] = 30.0,
    host_timeout: Annotated[
        float, typer.Option(help="Seconds without a word after which another host is lost.")
    ] = 15.0,
    sync_dst_dir: Annotated[
        str | None,
        typer.Option(
            help="Copy the working folder to this folder of every host first, and run there."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="A pattern that is not copied (as for rsync); may be repeated."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME=VALUE: a variable for all workers; NAME alone takes its value here. "
            "May be repeated."
        ),
    ] = None,
    sbatch: Annotated[
        str | None,
        typer.Option(
            help='Options for sbatch, where --launcher slurm submits a job: "--nodes=2 --time=30".'
        ),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Where a job is submitted: show its output until it ends."),
    ] = False,
    mpirun: Annotated[
        str | None,
        typer.Option(
            help='More options for the MPI launcher, with --launcher mpi: "--bind-to none".'
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="The Python on the other hosts. Default: the path of this one."),
    ] = None,
    horovod: Annotated[
        bool,
        typer.Option(
            "--horovod",
            help="`import horovod` means allhands.horovod, and options are horovodrun's. See "
            "docs/horovod.md.",
        ),
    ] = False,
) -> int:
    """Run a script, module or program in several workers, on this machine or on others.

    Each worker gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
    allhands.init() and torch.distributed.init_process_group() find the others by them. When one
    worker fails, the others are stopped; the exit code is that of the first one that failed.
    SIGTERM stops the workers, SIGUSR1 and SIGUSR2 are passed on to them.
    """
    if not command:
        raise UserError("no script was given; write `allhands launch -n 2 train.py`")
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: it must be at least 1")
    chosen_launcher = launcher or (Launcher.ssh if hosts else Launcher.local)
    elsewhere = chosen_launcher is not Launcher.local
    _check_together(
        chosen_launcher,
        {
            "--hosts": (hosts, {Launcher.ssh, Launcher.mpi}),
            "--sync-dst-dir": (sync_dst_dir, {Launcher.ssh}),
            "--exclude": (exclude, {Launcher.ssh}),
            "--python": (python, {Launcher.ssh, Launcher.slurm, Launcher.mpi}),
            "--mpirun": (mpirun, {Launcher.mpi}),
            "--sbatch": (sbatch, {Launcher.slurm}),
            "--wait": (wait, {Launcher.slurm}),
        },
    )
    chosen = _module(command) if module else parse(command, elsewhere=elsewhere)
    variables = read_env(env or [])
    if horovod:
        variables[alias.VARIABLE] = "1"
        if chosen_launcher is Launcher.mpi:  # its workers have no agent of ours
            variables["PYTHONPATH"] = alias.search_path(os.environ)
    if not elsewhere and workers is None:
        workers = default_workers()
    options = Options(
        workers=workers,
        servers=servers,
        cwd=None if not elsewhere else sync_dst_dir or os.getcwd(),
        log_dir=log_dir,
        prefix=prefix,
        grace=grace,
        heartbeat_timeout=heartbeat_timeout,
        host_timeout=host_timeout,
        threads=threads,
        preload=preload,
        max_restarts=max_restarts,
        server_restarts=server_restarts,
        on_worker_failure=on_worker_failure.value,
        min_workers=min_workers,
        rejoin_timeout=rejoin_timeout,
    )
    options.check()
    if chosen_launcher is Launcher.ssh:
        assert hosts is not None
        specs = read_hosts(hosts)
        copy = (os.getcwd(), sync_dst_dir, exclude or ()) if sync_dst_dir else None
        forwarded = {**forwarded_variables(), **variables}
        there: list[Host] = [
            SshHost(spec, python or sys.executable, forwarded, copy) for spec in specs
        ]
        return run_job(chosen, there, options, [spec.slots for spec in specs])
    if chosen_launcher is Launcher.mpi:
        return run_mpi(
            chosen,
            read_hosts(hosts) if hosts else [],
            options
            if hosts or workers is not None
            else replace(options, workers=default_workers()),
            variables=variables,
            exported=sorted(forwarded_variables()),
            python=python or sys.executable,
            more=shlex.split(mpirun or ""),
        )
    if chosen_launcher is Launcher.slurm:
        given = allocation(os.environ)
        if given is None:
            return submit(_without_wait(context.obj), workers, shlex.split(sbatch or ""), wait)
        names = zip(given.nodes, given.cpus, strict=True)
        there = [SlurmNode(name, python or sys.executable, variables, cpus) for name, cpus in names]
        return run_job(chosen, there, options, given.slots if workers is None else None)
    return run_job(chosen, [LocalHost(variables)], options)


def run_job(
    command: Command,
    hosts: Sequence[Host],
    options: Options,
    slots: Sequence[int | None] | None = None,
) -> int:
    """Run it, and say what came of it; the one place where a job of any launcher begins."""
    return Job(command, hosts, options, slots).run()


def _without_wait(argv: Sequence[str]) -> list[str]:
    """The words of `allhands launch …` for the job that is submitted; a `--wait` before the script
    was for its submission."""
    words = list(argv[1:])
    if "--wait" in words:
        words.remove("--wait")
    return words


def _check_together(launcher: Launcher, given: Mapping[str, tuple[Any, set[Launcher]]]) -> None:
    if launcher is Launcher.ssh and not given["--hosts"][0]:
        raise UserError(
            "--launcher ssh needs the hosts: write -H d1,d2, or -H FILE with one host a line"
        )
    for name, (value, launchers) in given.items():
        if value and launcher not in launchers:
            right = " or ".join(
                f"--launcher {other.value}" for other in Launcher if other in launchers
            )
            raise UserError(
                f"{name} is for {right}, and the launcher here is {launcher.value}; write one, or "
                f"leave {name} out"
            )


def read_env(words: Sequence[str]) -> dict[str, str | None]:
    """The variables that `--env` names.

    Raises:
        UserError: a name is none, or NAME alone is not set here.
    """
    found: dict[str, str | None] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not name.isidentifier():
            raise UserError(
                f"--env {word}: {name!r} is no name of a variable; write --env NAME or --env "
                "NAME=VALUE"
            )
        if not sign and name not in os.environ:
            raise UserError(
                f"--env {name}: it is not set here; write --env {name}=VALUE, or set it first"
            )
        found[name] = value if sign else os.environ[name]
    return found


# Variables of this shell that mean the job and not this machine.
_FORWARDED = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "OMP_",
    "MKL_",
    "ALLHANDS_",
    "PYTHONHASHSEED",
    "PYTHONWARNINGS",
)


def forwarded_variables() -> dict[str, str | None]:
    """The variables of this process that workers on other hosts get as well."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED) and name != MARK
    }


def _module(words: list[str]) -> Command:
    return Command("module", words[0], tuple(words[1:]))


def parse(words: list[str], *, elsewhere: bool = False) -> Command:
    """Tell a Python script from another program.

    Args:
        words: the command and its arguments, or the whole command in one word.
        elsewhere: it runs on other hosts, where other files exist; the name alone decides.

    Raises:
        UserError: there is no such file or program.
    """
    if len(words) == 1 and " " in words[0] and not Path(words[0]).exists():
        # A whole command in quotes, as launchers of parameter servers take it.
        words = shlex.split(words[0])
    target, args = words[0], tuple(words[1:])
    path = Path(target)
    if elsewhere:
        return Command(
            "script" if path.suffix in (".py", ".pyz", ".zip") else "program", target, args
        )
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise UserError(f"{target!r} is a folder without a __main__.py")
        return Command("script", target, args)
    if path.suffix in (".py", ".pyz", ".zip"):
        if not path.is_file():
            raise UserError(f"there is no script {target!r}{_similar(path)}")
        return Command("script", target, args)
    if path.is_file() and not os.access(path, os.X_OK) and os.sep not in target:
        return Command("script", target, args)
    program = shutil.which(target)
    if program is None:
        raise UserError(f"there is no script or program {target!r}{_similar(path)}")
    return Command("program", target, args)


def _similar(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f": there is no folder {str(path.parent)!r}"
    near = nearest(path.name, names, cutoff=0.7)
    where = "the working folder" if path.parent == Path() else str(path.parent)
    return f" (looked in {where})" + (
        f"; did you mean {str(path.parent / near)!r}?" if near else ""
    )


def default_workers() -> int:
    """One worker for each GPU that CUDA_VISIBLE_DEVICES leaves, or for each core when there is
    none."""
    return gpus() or cores()
