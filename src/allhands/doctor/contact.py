"""The doctor's end of the conversation with the probe on one host."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import allhands
from allhands.errors import HostError
from allhands.launch.handle import AgentHandle
from allhands.launch.remote import (
    AGENT_LINE,
    agent_command,
    agent_words,
    await_agent,
    first_message,
    start_process,
)
from allhands.launch.ssh import SshHost, explain, neutral

# From the start of ssh to the probe's first word.
LOGIN_S = 15.0

# What the probe is made of, each after those that it imports.
_SENT = (
    "allhands.errors",
    "allhands.wire.framing",
    "allhands.wire.users",
    "allhands.wire.proof",
    "allhands.wire.listeners",
    "allhands.wire.links",
    "allhands.wire.silence",
    "allhands.wire.acceptor",
    "allhands.wire",
    "allhands.world.cores",
    "allhands.world.interface",
    "allhands.doctor.host_facts",
    "allhands.doctor.probe_network",
    "allhands.doctor.probe",
)

# As in `remote`, `-c` has put the working folder first on the path. The modules are the sender's,
# also where the host has some version of allhands. Packages are not made, so nothing is looked for
# on a disk.
_PROGRAM = """
import types
sys.flags.safe_path or sys.path.pop(0)
sys.path.extend(entry for entry in message["path"] if entry not in sys.path)
os.write(1, message["line"])
for name, _ in message["modules"]:
    sys.modules[name] = types.ModuleType(name)
for name, text in message["modules"]:
    exec(compile(text, "<allhands doctor: %s>" % name, "exec"), vars(sys.modules[name]))
sys.modules["allhands.doctor.probe"].main()
"""


def _source(name: str) -> str:
    path = Path(allhands.__file__).parent.joinpath(*name.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path.read_text(encoding="utf-8")


def _first_message(env: Mapping[str, str | None], path: list[str]) -> bytes:
    modules = [(name, _source(name)) for name in _SENT]
    return first_message(env, _PROGRAM, path=path, line=AGENT_LINE, modules=modules)


class Contact:
    """A probe on one host, or on this machine.

    Args:
        name: the host, for messages.
        ssh: how it is reached; None for this machine.
        python: the Python there.
        env: variables for the probe, as workers would get them.
    """

    def __init__(
        self, name: str, ssh: SshHost | None, python: str, env: Mapping[str, str | None]
    ) -> None:
        self.name, self.ssh = name, ssh
        self.login_s = 0.0
        self.noise = b""  # what the login shell printed on standard output
        self._python, self._env = python, dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._handle: AgentHandle | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Log in and start the probe.

        Raises:
            HostError: that cannot be done; says why.
        """
        if self.ssh is None:
            words, path = agent_words(self._python), [entry for entry in sys.path if entry]
        else:
            words = self.ssh.command(agent_command(neutral(self._python)), carries_others=True)
            path = []
        began = time.monotonic()
        self._process = start_process(words, _first_message(self._env, path))
        said: Callable[[str], str] = lambda text: explain(self.name, text)  # noqa: E731
        self._handle = await_agent(self._process, self.name, self._python, said, timeout=LOGIN_S)
        self.login_s = time.monotonic() - began
        self.noise = self._handle.noise

    def ask(self, op: str, timeout: float = 10.0, **question: Any) -> Any:
        """What the probe answers.

        Raises:
            HostError: it failed, is gone, or did not answer in time.
        """
        assert self._handle is not None
        with self._lock:
            self._handle.send(op=op, **question)
            deadline = time.monotonic() + timeout
            while True:
                ready, _, _ = select.select(
                    [self._handle.events], [], [], max(0.0, deadline - time.monotonic())
                )
                if not ready:
                    self.close()  # its late answer must not be taken for that to another question
                    raise HostError(
                        self.name, f"it did not answer within {timeout:.0f} s (asked for {op})"
                    )
                data = os.read(self._handle.events, 1 << 18)
                if not data:
                    raise HostError(self.name, f"{self._handle.why_gone()} (asked for {op})")
                for answer in self._handle.inbox.feed(data):
                    if "error" in answer:
                        raise HostError(
                            self.name,
                            f"the examination failed there (asked for {op}): {answer['error']}",
                        )
                    return answer["answer"]

    def close(self) -> None:
        """End the probe, which takes away what it made, and the connection."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
