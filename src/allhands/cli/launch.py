"""`allhands launch`: run a script, module or program in several workers, here or on other hosts."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from allhands.cli import launch_options as option
from allhands.cli.launch_options import Launcher, OnWorkerFailure
from allhands.errors import UserError, nearest
from allhands.launch import horovod_alias as alias
from allhands.launch.hosts import HostSpec, read_hosts
from allhands.launch.job import Job
from allhands.launch.job_nodes import Host
from allhands.launch.local import LocalHost
from allhands.launch.mpi import run_mpi
from allhands.launch.options import Options
from allhands.launch.plan import Command
from allhands.launch.processes import gpus
from allhands.launch.protocol import MARK
from allhands.launch.slurm import Allocation, SlurmNode, allocation, submit
from allhands.launch.ssh import SshHost
from allhands.world.cores import cores


def launch(
    context: typer.Context,
    command: option.Command = None,
    *,
    workers: option.Workers = None,
    servers: option.Servers = 0,
    hosts: option.Hosts = None,
    launcher: option.StartedBy = None,
    module: option.Module = False,
    log_dir: option.LogDir = None,
    prefix: option.Prefix = True,
    grace: option.Grace = 5.0,
    heartbeat_timeout: option.HeartbeatTimeout = 60.0,
    threads: option.Threads = None,
    preload: option.Preload = True,
    max_restarts: option.MaxRestarts = 0,
    server_restarts: option.ServerRestarts = 0,
    on_worker_failure: option.AfterFailure = OnWorkerFailure.stop,
    elastic: option.Elastic = False,
    spares: option.Spares = 0,
    min_workers: option.MinWorkers = None,
    max_workers: option.MaxWorkers = None,
    rejoin_timeout: option.RejoinTimeout = 30.0,
    host_timeout: option.HostTimeout = 15.0,
    sync_dst_dir: option.SyncDstDir = None,
    exclude: option.Exclude = None,
    env: option.Env = None,
    env_worker: option.EnvWorker = None,
    env_server: option.EnvServer = None,
    sbatch: option.Sbatch = None,
    wait: option.Wait = False,
    mpirun: option.Mpirun = None,
    python: option.Python = None,
    horovod: option.Horovod = False,
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
    given = {
        "--hosts": hosts,
        "--sync-dst-dir": sync_dst_dir,
        "--exclude": exclude,
        "--python": python,
        "--mpirun": mpirun,
        "--sbatch": sbatch,
        "--wait": wait,
    }
    _check_together(chosen_launcher, given)
    chosen = _module(command) if module else parse(command, elsewhere=elsewhere)
    variables = _variables(env or [], horovod, chosen_launcher)
    if workers is None and not hosts and chosen_launcher in (Launcher.local, Launcher.mpi):
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
        elastic=elastic,
        spares=spares,
        min_workers=min_workers,
        max_workers=max_workers,
        rejoin_timeout=rejoin_timeout,
        env_worker=read_env(env_worker or [], "--env-worker"),
        env_server=read_env(env_server or [], "--env-server"),
        env_joined={} if max_workers is None else forwarded_variables() | variables,
    )
    options.check()
    python = python or sys.executable
    specs = read_hosts(hosts) if hosts else []
    if chosen_launcher is Launcher.ssh:
        copy = (os.getcwd(), sync_dst_dir, exclude or ()) if sync_dst_dir else None
        return _run_over_ssh(chosen, specs, options, variables, python, copy)
    if chosen_launcher is Launcher.mpi:
        exported, more = sorted(forwarded_variables()), shlex.split(mpirun or "")
        return run_mpi(
            chosen, specs, options, variables=variables, exported=exported, python=python, more=more
        )
    if chosen_launcher is Launcher.slurm and (nodes := allocation(os.environ)) is not None:
        return _run_in_allocation(chosen, nodes, options, variables, python)
    if chosen_launcher is Launcher.slurm:
        return submit(_without_wait(context.obj), workers, shlex.split(sbatch or ""), wait)
    return run_job(chosen, [LocalHost(variables)], options)


def _variables(words: Sequence[str], horovod: bool, launcher: Launcher) -> dict[str, str | None]:
    variables = read_env(words)
    if horovod:
        variables[alias.VARIABLE] = "1"
        if launcher is Launcher.mpi:  # its workers have no agent of ours
            variables["PYTHONPATH"] = alias.search_path(os.environ)
    return variables


def _run_over_ssh(
    command: Command,
    specs: Sequence[HostSpec],
    options: Options,
    variables: Mapping[str, str | None],
    python: str,
    copy: tuple[str, str, Sequence[str]] | None,
) -> int:
    forwarded = {**forwarded_variables(), **variables}
    hosts = [SshHost(spec, python, forwarded, copy) for spec in specs]
    return run_job(command, hosts, options, [spec.slots for spec in specs])


def _run_in_allocation(
    command: Command,
    given: Allocation,
    options: Options,
    variables: Mapping[str, str | None],
    python: str,
) -> int:
    names = zip(given.nodes, given.cpus, strict=True)
    hosts = [SlurmNode(name, python, variables, cpus) for name, cpus in names]
    return run_job(command, hosts, options, given.slots if options.workers is None else None)


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


_LAUNCHERS_OF = {
    "--hosts": {Launcher.ssh, Launcher.mpi},
    "--sync-dst-dir": {Launcher.ssh},
    "--exclude": {Launcher.ssh},
    "--python": {Launcher.ssh, Launcher.slurm, Launcher.mpi},
    "--mpirun": {Launcher.mpi},
    "--sbatch": {Launcher.slurm},
    "--wait": {Launcher.slurm},
}


def _check_together(launcher: Launcher, given: Mapping[str, Any]) -> None:
    if launcher is Launcher.ssh and not given["--hosts"]:
        raise UserError(
            "--launcher ssh needs the hosts: write -H d1,d2, or -H FILE with one host a line"
        )
    for name, value in given.items():
        if value and launcher not in _LAUNCHERS_OF[name]:
            right = " or ".join(
                f"--launcher {other.value}" for other in Launcher if other in _LAUNCHERS_OF[name]
            )
            raise UserError(
                f"{name} is for {right}, and the launcher here is {launcher.value}; write one, or "
                f"leave {name} out"
            )


def read_env(words: Sequence[str], option: str = "--env") -> dict[str, str | None]:
    """The variables that `--env`, or an option like it, names.

    Args:
        words: NAME, NAME=VALUE, or as MXNet's launcher has it NAME:VALUE.
        option: as it was written.
    """
    found: dict[str, str | None] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or ":" in name:
            name, sign, value = word.partition(":")
        if not name.isidentifier():
            raise UserError(
                f"{option} {word}: {name!r} is no name of a variable; write {option} NAME or "
                f"{option} NAME=VALUE"
            )
        if not sign and name not in os.environ:
            raise UserError(
                f"{option} {name}: it is not set here; write {option} {name}=VALUE, or set it first"
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
