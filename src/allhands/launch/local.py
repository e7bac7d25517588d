"""Starts workers on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from allhands.launch import processes
from allhands.launch.handle import AgentHandle
from allhands.launch.job import Job
from allhands.launch.options import Options
from allhands.launch.plan import Command

# `-m` would put the working folder first on the path, where a file named like a standard module
# would break the agent. The folder of this package is added for callers that found it through
# their own sys.path.
_BOOT = """\
import sys
sys.flags.safe_path or sys.path.pop(0)
root = sys.argv.pop(1)
root in sys.path or sys.path.append(root)
from allhands.launch.agent import main
main()"""


def start_agent(env: Mapping[str, str | None] | None = None) -> AgentHandle:
    """Start an agent on this machine, in a session of its own, out of reach of the terminal's
    Ctrl-C.

    `env` is set here already, because Python and the dynamic linker read some variables only when a
    process starts.
    """
    merged = {**os.environ, **(env or {})}
    root = str(Path(__file__).parents[2])
    with processes.held_signals():
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={name: value for name, value in merged.items() if value is not None},
            start_new_session=True,
        )
    return AgentHandle(process, host=os.uname().nodename, local=True)


class LocalHost:
    """This machine. `env`: variables to set, or with None to remove, for all workers."""

    local = True

    def __init__(self, env: Mapping[str, str | None] | None = None) -> None:
        self.name = os.uname().nodename
        self._env = env

    def start(self) -> AgentHandle:
        return start_agent(self._env)

    def close(self) -> None:
        """Nothing has to be let go of."""


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
    servers: int = 0,
    max_restarts: int = 0,
    server_restarts: int = 0,
    on_worker_failure: str = "stop",
) -> int:
    """Run a command in `workers` processes of this machine and look after them until none is left.

    Must be called in the main thread, because it handles signals while it runs. The first SIGINT,
    SIGTERM or SIGHUP stops the workers with SIGTERM and, after `grace` seconds, SIGKILL; a second
    one kills them at once. SIGUSR1 and SIGUSR2 are passed on to the workers. A worker that leaves
    with 128 + SIGTERM, SIGUSR1 or SIGUSR2 has stopped on request: that is no failure, and the
    others have `grace` seconds to follow.

    Args:
        command: what to run.
        workers: how many.
        env: variables to set, or with None to remove, for all workers.
        log_dir: folder for one `rank-N.log` each.
        prefix: start every line of output with `[rank] `.
        grace: seconds from SIGTERM to SIGKILL.
        heartbeat_timeout: a Python worker that gives no sign of life for so many seconds has
            failed; 0 waits for ever.
        threads: CPU threads a worker; default OMP_NUM_THREADS, or the cores divided among the
            workers.
        preload: import torch once, before the workers are forked, instead of in each.
        servers: how many parameter servers to start beside the workers.
        max_restarts: how many times to start all workers again after a failure;
            TORCHELASTIC_RESTART_COUNT tells them.
        server_restarts: how many times a server that died is started again while the workers run
            on, all servers together.
        on_worker_failure: "stop", "continue" or "restart"; see docs/launching.md. The last two need
            servers.

    Returns:
        0 when every worker ended with 0, or the others went on without those that did not; else the
        exit code of the worker that failed first, 128 + N for a death by signal N; 128 + N when
        signal N stopped the launcher, or the workers stopped on request with that code.

    Raises:
        UserError: an argument cannot be honoured.
        WorkerError: the agent process could not be started.
    """
    options = Options(
        workers=workers,
        log_dir=log_dir,
        prefix=prefix,
        grace=grace,
        heartbeat_timeout=heartbeat_timeout,
        threads=threads,
        preload=preload,
        servers=servers,
        max_restarts=max_restarts,
        server_restarts=server_restarts,
        on_worker_failure=on_worker_failure,
    )
    return Job(command, [LocalHost(env)], options).run()
