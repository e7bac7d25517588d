"""Starts workers on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands.errors import UserError
from allhands.launch.output import Output, show
from allhands.launch.plan import Command, environment
from allhands.launch.report import describe, describe_stop
from allhands.launch.signals import restore, stop_on_signals
from allhands.launch.supervisor import KeeperHandle, Supervisor

ADDRESS = "127.0.0.1"
PRELOAD = ("torch", "torch.distributed", "numpy")

# `-m` would put the working folder first on the path, where a file named like a standard module would break
# the keeper. The folder of this package is added for callers that found it through their own sys.path.
_BOOT = """\
import sys
sys.flags.safe_path or sys.path.pop(0)
root = sys.argv.pop(1)
root in sys.path or sys.path.append(root)
from allhands.launch.keeper import main
main()"""


def start_keeper(env: Mapping[str, str | None] | None = None) -> KeeperHandle:
    """Start a keeper on this machine, in a session of its own, out of reach of the terminal's Ctrl-C.

    `env` is set here already, because Python and the dynamic linker read some variables only when a process starts.
    """
    merged = {**os.environ, **(env or {})}
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={name: value for name, value in merged.items() if value is not None},
        start_new_session=True,
    )
    return KeeperHandle(process, host=os.uname().nodename, local=True)


def check_numbers(workers: int, grace: float, heartbeat_timeout: float, threads: int | None) -> None:
    """Refuse what cannot be meant.

    Raises:
        UserError: naming the number and what it must be.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UserError(f"workers={workers!r}: it must be a whole number of at least 1")
    if grace < 0:
        raise UserError(f"grace={grace!r}: it must be 0 or more seconds")
    if heartbeat_timeout < 0:
        raise UserError(f"heartbeat_timeout={heartbeat_timeout!r}: it must be 0 (never) or more seconds")
    if threads is not None and threads < 1:
        raise UserError(f"threads={threads!r}: it must be at least 1")


def local_tasks(task: Mapping[str, Any], workers: int, port: int) -> list[dict[str, Any]]:
    """The same task once for each rank, with the variables that make the ranks one world."""
    run_id = uuid.uuid4().hex[:12]
    tasks = []
    for rank in range(workers):
        env = environment(
            rank,
            workers,
            local_rank=rank,
            local_world_size=workers,
            node_rank=0,
            address=ADDRESS,
            port=port,
            run_id=run_id,
        )
        tasks.append({**task, "rank": rank, "env": env})
    return tasks


def launch_local(
    command: Command,
    workers: int,
    *,
    env: Mapping[str, str | None] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    prefix: bool = True,
    grace: float = 5.0,
    heartbeat_timeout: float = 60.0,
    threads: int | None = None,
    preload: bool = True,
) -> int:
    """Run a command in `workers` processes of this machine and look after them until none is left.

    Must be called in the main thread, because it handles signals while it runs. The first SIGINT, SIGTERM or SIGHUP stops the
    workers with SIGTERM and, after `grace` seconds, SIGKILL; a second one kills them at once. SIGUSR1 and SIGUSR2 are passed on
    to the workers. A worker that leaves with 128 + SIGTERM, SIGUSR1 or SIGUSR2 has stopped on request: that is no failure, and
    the others have `grace` seconds to follow.

    Args:
        command: what to run.
        workers: how many.
        env: variables to set, or with None to remove, for all workers.
        log_dir: folder for one `rank-N.log` each.
        prefix: start every line of output with `[rank] `.
        grace: seconds from SIGTERM to SIGKILL.
        heartbeat_timeout: a Python worker that gives no sign of life for so many seconds has failed; 0 waits
            for ever.
        threads: CPU threads a worker; default OMP_NUM_THREADS, or the cores divided among the workers.
        preload: import torch once, before the workers are forked, instead of in each.

    Returns:
        0 when every worker ended with 0; else the exit code of the worker that failed first, 128 + N for a
        death by signal N; 128 + N when signal N stopped the launcher, or the workers stopped on request with that code.

    Raises:
        UserError: an argument cannot be honoured.
        WorkerError: the keeper process could not be started.
    """
    check_numbers(workers, grace, heartbeat_timeout, threads)
    output = Output(prefix, log_dir)
    supervisor = Supervisor([start_keeper(env)], output, grace=grace, heartbeat_timeout=heartbeat_timeout)
    before = stop_on_signals(supervisor)
    try:
        supervisor.prepare(
            ADDRESS,
            env={},
            cwd=None,
            parent=os.getpid(),
            local_workers=workers,
            threads=threads,
            preload=list(PRELOAD) if preload and command.kind != "program" else [],
        )
        first = supervisor.run([local_tasks(command.task(), workers, supervisor.wait_ready())])
    except KeyboardInterrupt:
        first = None
    except BrokenPipeError:
        # Whoever read our output has left, as `head` does; other programs end with this code then.
        _silence_stdout()
        return 128 + signal.SIGPIPE
    finally:
        supervisor.close()
        restore(before)
    workers_seen = list(supervisor.workers.values())
    if first is None:
        number = supervisor.stopped_by()
        if number is None:
            return 0
        show(sys.stderr, f"{describe_stop(number, workers_seen, bool(supervisor.signals))}\n".encode())
        return 128 + number
    text = describe(first, workers_seen, output.log_path(first.rank), grace, with_traceback=False)
    show(sys.stderr, text.encode("utf-8", "backslashreplace") + b"\n")
    return first.exit_code()


def _silence_stdout() -> None:
    """Keep Python from complaining about the same closed pipe again when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
