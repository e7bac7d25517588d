"""Flower's superexec at a site, which forks the process of a message from one that has imported
all that it needs.

Flower starts a new Python for every message, which spends most of its time on imports: about a
second of a processor for each site and round.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from allhands.errors import UserError
from allhands.federated.sites import flower, flower_compat, message_process
from allhands.federated.sites.flower_compat import EXECUTOR, TASK_LOOP
from allhands.federated.sites.task_pipe import TaskReader
from allhands.launch import processes

#: The one command that is forked; every other task of Flower's is one that no site runs.
COMMAND = "flwr-clientapp"
_MOST = 1 << 16  # bytes of the arguments of one process


class ForkServer:
    """A process with one thread that forks itself for every request, and ends with whoever made
    it.

    To be made before this process has threads.

    Args:
        work: what a fork does with the arguments that it was asked with. Its exit code is that of
            the `SystemExit` that it raises, 0 without, and 1 after any other exception, which is
            printed.
    """

    def __init__(self, work: Callable[[list[str]], object]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            _serve(theirs, parent, work)
        theirs.close()

    def start(self, arguments: Sequence[str]) -> None:
        """Have a process started.

        Raises:
            OSError: the server is gone, or the arguments are too long.
        """
        content = json.dumps(list(arguments)).encode()
        if len(content) > _MOST:
            raise OSError(f"{len(content)} bytes of arguments; {_MOST} are the most")
        self._socket.sendall(content)

    def close(self) -> None:
        """End the server, and wait for it; what it has forked goes on."""
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _serve(asked: socket.socket, parent: int, work: Callable[[list[str]], object]) -> NoReturn:
    code = 1
    try:
        processes.die_with_parent(parent)
        # Nobody asks for a fork's exit code: the system may forget it.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while content := asked.recv(_MOST):
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                asked.close()
                code = _exit_code(work, json.loads(content))
                break
        else:
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _exit_code(work: Callable[[list[str]], object], arguments: list[str]) -> int:
    try:
        work(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork_messages(module: Any, server: ForkServer) -> None:
    """Let Flower's executor, which starts processes by `subprocess.Popen`, ask the server for
    those of messages.

    Raises:
        UserError: this Flower starts them in another way.
    """
    import subprocess

    if getattr(module, "subprocess", None) is not subprocess:
        raise UserError(f"{EXECUTOR} does not use subprocess: {flower.INSTALL}")

    class Processes:
        DEVNULL = subprocess.DEVNULL

        @staticmethod
        def Popen(args: Sequence[str], **_: Any) -> None:
            if args[0] != COMMAND:
                raise UserError(f"a site runs no such task: {args[0]}")
            server.start(args[1:])

    module.subprocess = Processes


def main() -> None:
    """`flower-superexec`, with its own arguments."""
    flower.require()
    message_process.prepare()
    fork_messages(EXECUTOR.load(), ForkServer(message_process.run))
    TASK_LOOP.set_sleep(TASK_LOOP.load(), TaskReader(os.environ).wait)
    flower_compat.flower_superexec()


if __name__ == "__main__":
    main()
