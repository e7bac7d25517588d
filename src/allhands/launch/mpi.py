"""`allhands launch --launcher mpi`: the command line of the mpirun or mpiexec that is here, in its
own words.

MPI's launcher starts the ranks and passes on their output, signals and exit codes. The ranks
themselves notice one of them that hangs: `allhands.init` sees to it. What is added here: lines stay
whole, and a launcher that waits for a lost host after the ranks have given up is ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allhands.errors import UserError
from allhands.launch import processes
from allhands.launch.hosts import HostSpec, deal
from allhands.launch.lines import LineCutter
from allhands.launch.mpi_servers import MpiServers
from allhands.launch.options import Options
from allhands.launch.output import show
from allhands.launch.plan import Command
from allhands.launch.python import as_python
from allhands.wire import TOKEN, new_token
from allhands.world.failure_detector import TIMEOUT_VARIABLE
from allhands.world.failure_monitor import LAST_WORDS

# What runs a script or a module in a rank.
RANK = "allhands.launch.mpi_rank"
# Seconds for MPI's launcher to end after the ranks have.
_GRACE = 8.0
# Open MPI's mark before each line.
_TAG = re.compile(rb"^\[\d+,(\d+)\]<std(?:out|err)>: ?", re.MULTILINE)
# What MPI's launchers have no word for.
_NOT_MPI = (
    "server_restarts",
    "on_worker_failure",
    "log_dir",
    "grace",
    "host_timeout",
    "max_restarts",
    "min_workers",
    "rejoin_timeout",
    "preload",
)


@dataclass(frozen=True)
class MpiLauncher:
    """An mpirun or mpiexec. `flavour` is "openmpi", or "mpich" for MPICH and all that come with its
    Hydra (Intel MPI too)."""

    program: str
    flavour: str


def find_launcher(environ: Mapping[str, str]) -> MpiLauncher:
    """The MPI launcher that is first in PATH."""
    program = next(
        (
            found
            for name in ("mpirun", "mpiexec")
            if (found := shutil.which(name, path=environ.get("PATH")))
        ),
        None,
    )
    if program is None:
        raise UserError(
            "--launcher mpi: there is no mpirun or mpiexec in PATH; pip install 'allhands[mpi]' "
            "mpich, or load your cluster's module of MPI"
        )
    try:
        asked = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
        said = asked.stdout + asked.stderr
    except subprocess.TimeoutExpired:
        said = ""
    if "Open MPI" in said or "OpenRTE" in said or "PRRTE" in said:
        return MpiLauncher(program, "openmpi")
    if "HYDRA" in said or "Hydra" in said or "Intel" in said:
        return MpiLauncher(program, "mpich")
    raise UserError(
        f"--launcher mpi: {program} is neither Open MPI's nor MPICH's; start it yourself: mpirun "
        "-n 4 python script.py"
    )


def command_line(
    launcher: MpiLauncher,
    command: Command,
    *,
    workers: int | None,
    hosts: Sequence[HostSpec],
    exported: Sequence[str],
    python: str,
    prefix: bool,
    options: Sequence[str] = (),
) -> list[str]:
    """The words that start `command` as MPI ranks.

    Args:
        launcher: whose words.
        command: what each rank runs.
        workers: how many ranks; None: all slots of the hosts.
        hosts: where; none for this machine.
        exported: names of variables that ranks on other hosts get as well.
        python: the interpreter for scripts and modules.
        prefix: let each line of output begin with its rank.
        options: more, for the launcher.
    """
    for host in hosts:
        if host.user or host.port:
            raise UserError(
                f"--launcher mpi: {host.name} has a user or port in --hosts, which MPI's launchers "
                "do not take; put them into ~/.ssh/config under that name"
            )
    slots = [host.slots for host in hosts]
    workers = _ranks(workers, hosts)
    counts = deal([host.name for host in hosts], slots, workers) if hosts else [workers]
    names = [host.name for host in hosts] or ["localhost"]
    places = ",".join(f"{name}:{count}" for name, count in zip(names, counts, strict=True) if count)
    words = [launcher.program, "-n", str(workers)]
    if launcher.flavour == "openmpi":
        # Slots are told, or it would refuse more ranks than cores.
        words += ["--host", places, *(["--tag-output"] if prefix else [])]
        words += [word for name in exported for word in ("-x", name)]
    else:
        words += [*(["-hosts", places] if hosts else []), *(["-prepend-rank"] if prefix else [])]
    return [*words, *options, *_ranks_command(command, python)]


def _ranks(workers: int | None, hosts: Sequence[HostSpec]) -> int:
    slots = [host.slots for host in hosts]
    if workers is None:
        if not hosts or None in slots:
            raise UserError(
                "--launcher mpi: nobody said how many ranks; write -n WORKERS, or slots=N after "
                "each host"
            )
        workers = sum(slot or 0 for slot in slots)
    return workers


def _ranks_command(command: Command, python: str) -> list[str]:
    task: dict[str, Any] = {command.kind: command.target, "args": command.args}
    if command.kind == "program":
        task = as_python({"program": [command.target, *command.args]})
        if "program" in task:
            return list(task["program"])
    kind = "script" if "script" in task else "module"
    return [python, "-m", RANK, kind, task[kind], *task["args"]]


def run_mpi(
    command: Command,
    hosts: Sequence[HostSpec],
    options: Options,
    *,
    variables: Mapping[str, str | None],
    exported: Sequence[str],
    python: str,
    more: Sequence[str],
) -> int:
    """Run `command` under the MPI launcher that is here. Must be called in the main thread, because
    it handles signals.

    Args:
        command: what each rank runs.
        hosts: where; none for this machine.
        options: how; those that MPI's launchers have no word for are refused.
        variables: to set for all ranks.
        exported: names of the other variables that ranks on other hosts get.
        python: the interpreter for scripts and modules.
        more: options for the launcher.

    Returns:
        The launcher's exit code; 128 + N when signal N ended it.
    """
    refused = [name for name in _NOT_MPI if getattr(options, name) != getattr(Options(), name)]
    if refused:
        named = ", ".join(
            f"--{'no-preload' if name == 'preload' else name.replace('_', '-')}" for name in refused
        )
        raise UserError(
            f"{named}: with --launcher mpi the ranks belong to MPI's launcher, which cannot do "
            "that; leave it out, or use --launcher ssh or slurm"
        )
    if options.servers and RANK not in _ranks_command(command, python):
        raise UserError(
            f"--servers with --launcher mpi: {command.target} is no Python script, which alone is "
            "told where the servers are; start servers with --launcher ssh"
        )
    launcher = find_launcher(os.environ)
    given = {**variables, **options.env_worker}
    own = {name: value for name, value in given.items() if value is not None}
    if options.threads is not None:
        own["OMP_NUM_THREADS"] = str(options.threads)
    if options.heartbeat_timeout != Options().heartbeat_timeout:
        own[TIMEOUT_VARIABLE] = f"{options.heartbeat_timeout:g}"
    # The ranks know the number of their job, which is no secret; this is.
    own[TOKEN] = own.get(TOKEN) or os.environ.get(TOKEN) or new_token()
    of_servers = {**variables, **options.env_server, TOKEN: own[TOKEN]}
    servers = MpiServers(
        options.servers,
        _ranks(options.workers, hosts),
        bool(hosts),
        {name: value for name, value in of_servers.items() if value is not None},
    )
    own |= servers.variables
    words = command_line(
        launcher,
        command,
        workers=options.workers,
        hosts=hosts,
        exported=sorted({*exported, *own}),
        python=python,
        prefix=options.prefix,
        options=more,
    )
    show(sys.stderr, f"allhands: {shlex.join(words)}\n".encode())
    parent = os.getpid()
    with servers, _Relay() as relay:
        process = subprocess.Popen(
            words,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(parent),  # noqa: PLW1509
        )
        assert process.stdout is not None
        assert process.stderr is not None
        relay.to(process)
        with process.stdout, process.stderr:
            gave_up = _show_output(process, servers)
        code = process.wait()
    if code < 0:
        return 128 - code
    return code or int(gave_up)


class _Relay:
    """SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 go to the launcher; a third SIGINT or SIGTERM
    kills it.

    What comes before there is a launcher is kept for it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: list[int] = []
        self._asked = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Relay:
        numbers = (signal.SIGINT, signal.SIGHUP, *processes.REQUESTS)
        self._before = processes.set_handlers(numbers, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        processes.restore_handlers(self._before)

    def to(self, process: subprocess.Popen[bytes]) -> None:
        """It is started."""
        self._process = process
        while self._kept:
            self._pass_on(self._kept.pop(0))

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._process is None:
            self._kept.append(number)
        else:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        assert self._process is not None
        self._asked += number in (signal.SIGINT, signal.SIGTERM)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL if self._asked > 2 else number)


def _show_output(process: subprocess.Popen[bytes], servers: MpiServers) -> bool:
    """Show what the ranks print, in whole lines, until the launcher ends; whether they have given
    up, or a server has."""
    assert process.stdout is not None
    assert process.stderr is not None
    streams = {
        process.stdout.fileno(): (LineCutter(), sys.stdout),
        process.stderr.fileno(): (LineCutter(), sys.stderr),
    }
    kill_at: float | None = None
    with selectors.DefaultSelector() as selector:
        for fd in streams:
            selector.register(fd, selectors.EVENT_READ)
        while streams:
            for key, _ in selector.select(1.0):
                cutter, stream = streams[key.fd]
                data = os.read(key.fd, 1 << 16)
                lines = cutter.feed(data) if data else cutter.flush()
                show(stream, _TAG.sub(rb"[\1] ", lines))
                if LAST_WORDS.encode() in lines and kill_at is None:
                    kill_at = time.monotonic() + _GRACE
                if not data:
                    selector.unregister(key.fd)
                    del streams[key.fd]
            if kill_at is None and streams and (failed := servers.failed()):
                show(sys.stderr, f"allhands: {failed}; the ranks are ended\n".encode())
                kill_at = time.monotonic() + _GRACE
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            if kill_at is not None and time.monotonic() > kill_at and process.poll() is None:
                show(
                    sys.stderr,
                    b"allhands: the MPI launcher still waits, for a host that does not answer; it "
                    b"is ended\n",
                )
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                break
    return kill_at is not None
