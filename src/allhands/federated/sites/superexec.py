"""Flower's superexec at a site, which forks the process of a message from itself: a Python that
starts for each message spends a second on its imports before it does anything."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import traceback
from types import SimpleNamespace
from typing import Any, NoReturn

from allhands.errors import UserError
from allhands.federated.sites import flower, message_process

_MESSAGE = "flwr-clientapp"  # what Flower starts for a message


def fork_messages(executor: Any) -> None:
    """Let Flower's executor of subprocesses fork for a message. All else it starts as before.

    Args:
        executor: the module.

    Raises:
        UserError: this Flower starts processes in another way.
    """
    if getattr(executor, "subprocess", None) is not subprocess:
        raise UserError(f"this Flower starts no subprocess for a message: {flower.INSTALL}")
    running: set[int] = set()

    def start(command: list[str], **options: Any) -> Any:
        for pid in list(running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                running.discard(pid)
        if command[0] != _MESSAGE:
            return subprocess.Popen(command, **options)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if not pid:
            _answer(command[1:], quiet=options.get("stdout") == subprocess.DEVNULL)
        running.add(pid)
        return None

    executor.subprocess = SimpleNamespace(**vars(subprocess))
    executor.subprocess.Popen = start


def _answer(arguments: list[str], quiet: bool) -> NoReturn:
    """Be the process of a message. Nothing of the process that was forked is ended with it."""
    code = 1
    try:
        from flwr.supercore.exit import exit_handler

        exit_handler.registered_exit_handlers.clear()  # they close the superexec's connections
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        if quiet:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
        message_process.main(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def main() -> None:
    """`flower-superexec`, with its own arguments."""
    flower.require()
    fork_messages(importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor"))
    message_process.prepare()
    from flwr.supercore.cli import flower_superexec

    flower_superexec()


if __name__ == "__main__":
    main()
