"""Agents of launched jobs in forks of `tests/fork_server.py`, and what such a fork is set to."""

from __future__ import annotations

import array
import ctypes
import functools
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Signals that are passed on to scripts.
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")


def set_environment(environment: Mapping[str, str]) -> None:
    """Also where others see it, which is the stack that this process has begun with."""
    os.environ.clear()
    os.environ.update(environment)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    block = b"".join(b"%b=%b\0" % item for item in os.environb.items())
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, block[: end - start - 1], min(len(block), end - start - 1))


def set_threads() -> None:
    cores = len(os.sched_getaffinity(0))
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", cores)))


class _ForkedProcess(subprocess.Popen[bytes]):
    """A child that was forked here, with pipes as its standard streams."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid, self.args, self.returncode = pid, "agent", None  # type: ignore[assignment]
        self.stdin, self.stdout = os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0)
        self.stderr = None
        self._waitpid_lock = threading.Lock()
        self._child_created = True


def spare_agent() -> Any:
    """Fork what becomes the first agent that this process asks for, before the script has done
    anything; in the fork this returns True once that is so."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    processes = sys.modules["allhands.launch.processes"]
    if pid > 0:
        there.close()
        return _give_first_agent(pid, here)
    here.close()
    processes.die_with_parent(parent)
    for name in FORWARDED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    data, ancillary, _, _ = there.recvmsg(10, socket.CMSG_SPACE(4 * 4))
    if not data:
        os._exit(0)
    stdin, stdout, stderr, request = array.array("i", ancillary[0][2])
    size = os.fstat(request).st_size
    environment, folder = marshal.loads(os.pread(request, size, 0))
    os.setsid()
    processes._prctl(processes._PR_SET_PDEATHSIG, 0)
    for name in FORWARDED:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    for number, end in enumerate((stdin, stdout, stderr)):
        os.dup2(end, number)
    for end in {stdin, stdout, stderr, request} - {0, 1, 2}:
        os.close(end)
    there.close()
    set_environment(environment)
    os.chdir(folder)
    return True


def _give_first_agent(pid: int, spare: socket.socket) -> None:
    from allhands.launch import idle_agents, join_client, local
    from allhands.launch.handle import AgentHandle

    plain = local.start_agent

    @functools.wraps(plain)
    def start_agent(env: Mapping[str, str | None] | None = None) -> Any:
        for module in users:
            module.start_agent = plain  # type: ignore[attr-defined]
        merged = {**os.environ, **(env or {})}
        request = os.memfd_create("request", os.MFD_CLOEXEC)
        variables = {name: value for name, value in merged.items() if value is not None}
        os.write(request, marshal.dumps((variables, os.getcwd())))
        (stdin, requests), (events, stdout) = os.pipe(), os.pipe()
        descriptors = array.array("i", [stdin, stdout, 2, request])
        spare.sendmsg([b"begin"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        spare.close()
        for end in (stdin, stdout, request):
            os.close(end)
        process = _ForkedProcess(pid, requests, events)
        return AgentHandle(process, host=os.uname().nodename, local=True)

    users: tuple[types.ModuleType, ...] = (local, idle_agents, join_client)
    for module in users:
        module.start_agent = start_agent  # type: ignore[attr-defined]


def let_agents_set_threads() -> None:
    from allhands.launch import agent

    prepare = agent.set_up

    def set_up(*args: Any) -> dict[str, Any]:
        told = prepare(*args)
        set_threads()
        return told

    agent.set_up = set_up
