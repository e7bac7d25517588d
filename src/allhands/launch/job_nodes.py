"""The hosts of a job, and the state of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from allhands.errors import HostError
from allhands.launch.handle import AgentHandle
from allhands.launch.plan import HostPart
from allhands.launch.python import same_version

# How often a lost host is asked whether it is back.
_RETRY_EVERY = 3.0


class Host(Protocol):
    """A host on which an agent can be started."""

    name: str
    local: bool  # it is this machine

    def start(self) -> AgentHandle:
        """Reach the host and start an agent; called in any thread. Raises `AllhandsError` when that
        cannot be done."""

    def close(self) -> None:
        """Let go of the host."""


class JobNode:
    """A host's part in the job. `workers` is None until the host has reported how many it takes."""

    def __init__(self, host: Host, workers: int | None, servers: Sequence[int]) -> None:
        self.host, self.workers, self.servers = host, workers, list(servers)
        self.agent: AgentHandle | None = None
        self.trouble: Exception | None = None
        self.thread: threading.Thread | None = None
        self.next_try = 0.0
        self.joined = False  # while the job ran; nobody but its user can start it again

    def begin(self) -> None:
        """Start an agent in the background."""
        self.trouble = None
        self.next_try = time.monotonic() + _RETRY_EVERY
        self.thread = threading.Thread(target=self._start, daemon=True)
        self.thread.start()

    def _start(self) -> None:
        try:
            self.agent = self.host.start()
        except Exception as error:
            self.trouble = error

    @property
    def is_starting(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


def check_versions(nodes: Sequence[JobNode]) -> None:
    """Refuse hosts whose Python, torch or allhands is another one than that of the first host."""
    known = [
        (node.host.name, node.agent.ready["versions"])
        for node in nodes
        if node.agent and node.agent.ready
    ]
    for name, versions in known[1:]:
        first_name, firsts = known[0]
        if differs := other_version(versions, firsts):
            what, version, first = differs
            raise HostError(
                name,
                f"it has {what} {version}, but {first_name} has {what} {first}; install "
                "the same on all hosts, or name another Python with --python PATH",
            )


def other_version(own: Mapping[str, str], firsts: Mapping[str, str]) -> tuple[str, str, str] | None:
    """What a host has in another version than the first one, and both versions."""
    for what, first in firsts.items():
        version = own.get(what, "absent")
        if not same_version(what, version, first):
            return what, version, first
    return None


def ranks_of(first: int, place: HostPart) -> str:
    """`ranks 2-3, server 1`: what runs on a host whose first rank is `first`."""
    last = first + place.workers - 1
    if not place.workers:
        words = []
    elif place.workers == 1:
        words = [f"rank {first}"]
    else:
        words = [f"ranks {first}-{last}"]
    words += [f"server {number}" for number in place.servers]
    return ", ".join(words)
