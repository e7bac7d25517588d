"""Where hosts ask to join a job that runs: proves the job's token, and keeps who came until the
launcher has time."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from allhands import wire
from allhands.launch.handle import AgentHandle
from allhands.launch.nodes import SocketProcess
from allhands.wire import LineReader, encode
from allhands.world.interface import reachable_addresses

# Of the folder with what a user takes to another machine.
TOKEN_FILE, COMMAND_FILE = "join.token", "join.txt"


class JoinListener:
    """Listens for hosts that join one job.

    Args:
        token: the job's.
        log_dir: where the file with the token is written, and one with the command; None: into a
            temporary folder.
        wake_up: called once a host has come.

    Raises:
        OSError: the files cannot be written.
    """

    def __init__(
        self, token: str, log_dir: str | os.PathLike[str] | None, wake_up: Callable[[], None]
    ) -> None:
        self._wake_up = wake_up
        self._came: queue.SimpleQueue[tuple[socket.socket, dict[str, Any]]] = queue.SimpleQueue()
        self._temporary = tempfile.mkdtemp(prefix="allhands-join-") if log_dir is None else None
        folder = Path(log_dir or self._temporary or "").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        listener = wire.listen()
        port = listener.getsockname()[1]
        key = folder / TOKEN_FILE
        key.unlink(missing_ok=True)
        with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{token}\n")
        places = [_joined(address, port) for address in reachable_addresses()]
        places = places or [f"127.0.0.1:{port}"]
        #: What is typed on another machine, for each address of this one.
        self.commands = [f"allhands join {place} --token-file {key} -n 1" for place in places]
        text = "".join(f"{command}\n" for command in self.commands)
        (folder / COMMAND_FILE).write_text(text)
        self._files = {key: f"{token}\n", folder / COMMAND_FILE: text}
        self._acceptor = wire.Acceptor(
            "the launcher, where hosts join the job", [listener], token.encode(), self._welcome
        )

    def start(self) -> None:
        """Begin to listen."""
        self._acceptor.start()

    def close(self) -> None:
        """Listen no more; the files are gone."""
        self._acceptor.close()
        while not self._came.empty():
            refuse(self._came.get()[0], "it has ended")
        for file, text in self._files.items():
            with contextlib.suppress(OSError):
                if file.read_text() == text:  # and not that of a later job
                    file.unlink()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def came(self) -> list[tuple[socket.socket, dict[str, Any]]]:
        """The connections since the last call, and what each says of itself."""
        found = []
        while not self._came.empty():
            found.append(self._came.get())
        return found

    def _welcome(self, link: socket.socket, said: dict[str, Any]) -> None:
        wire.keep_alive(link)
        self._came.put((link, said))
        self._wake_up()


def refuse(link: socket.socket, why: str) -> None:
    """Tell a host why it cannot join, and let go of it."""
    with contextlib.suppress(OSError):
        link.sendall(encode({"refused": why}))
    link.close()


def accept(link: socket.socket, host: str) -> JoinedAgent:
    """Tell a host that it may join; the agent that it starts."""
    with contextlib.suppress(OSError):
        link.sendall(encode({"accepted": True}))
    return JoinedAgent(link, host)


class JoinedAgent(AgentHandle):
    """The agent on a host that has joined, through `allhands join` there."""

    def __init__(self, link: socket.socket, host: str) -> None:
        super().__init__(cast(Any, SocketProcess(link)), host, local=False)
        self.inbox: _JoinedReader = _JoinedReader()

    def why_gone(self) -> str:
        """Why nothing more comes from it."""
        return f"`allhands join` on host {self.host} has ended, or its network is down"

    def dismiss(self, why: str) -> None:
        """Tell its user why it is let go of, and let go of it."""
        self.send(op="dismissed", why=why)
        self.close(2.0)


class _JoinedReader(LineReader):
    """Takes out what the agent could not do, which is no failure of the job."""

    def __init__(self) -> None:
        super().__init__()
        self.trouble = ""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes."""
        messages = super().feed(data)
        for message in messages:
            if message["event"] == "failed":
                self.trouble = str(message["text"])
        return [message for message in messages if message["event"] != "failed"]


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
