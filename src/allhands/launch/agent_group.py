"""The agents of one job, as the launcher listens to them all at once."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from allhands.errors import WorkerError
from allhands.launch.handle import AgentHandle
from allhands.launch.protocol import CHUNK

# Importing torch from a cold network file system can take minutes.
START_TIMEOUT = 300.0
_PING_EVERY = 1.0


class AgentGroup(ABC):
    """Waits for the events of some agents, and notices those that are gone.

    Args:
        agents: those that were started.
        heartbeat_timeout: seconds without a word from an agent of this host that count as its loss;
            0 waits for ever.
        host_timeout: seconds for one of another host.
    """

    def __init__(
        self, agents: Sequence[AgentHandle], heartbeat_timeout: float, host_timeout: float
    ) -> None:
        self.agents: list[AgentHandle] = []
        self.heartbeat_timeout, self.host_timeout = heartbeat_timeout, host_timeout
        self._selector = selectors.DefaultSelector()
        self._wake, self._wake_end = os.pipe()
        os.set_blocking(self._wake_end, False)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._looked_at = self._pinged_at = time.monotonic()
        for agent in agents:
            self.add(agent)

    @abstractmethod
    def is_asked_to_end(self) -> bool:
        """Whether a signal asks for the end of the job while no worker runs that could take it."""

    @abstractmethod
    def _hear(self, agent: AgentHandle, event: dict[str, Any]) -> None:
        """An agent has told something."""

    @abstractmethod
    def _lost(self, agent: AgentHandle, why: str) -> None:
        """Nothing more will come from an agent."""

    def add(self, agent: AgentHandle) -> None:
        """Take an agent into the job; it comes last."""
        self.agents.append(agent)
        self._selector.register(agent.events, selectors.EVENT_READ, agent)
        agent.heard_at = time.monotonic()
        for event in agent.inbox.feed(agent.early):
            self._hear(agent, event)
        agent.early = b""

    def remove(self, agent: AgentHandle) -> None:
        """Let go of an agent, which is left as it is."""
        self.agents.remove(agent)
        if not agent.lost:
            self._selector.unregister(agent.events)

    def prepare(self, address: str, **request: Any) -> None:
        """Ask every agent to set up its process and preload, and the first one to open the store
        at `address`.

        Returns at once; the agents work on it meanwhile.
        """
        for index, agent in enumerate(self.agents):
            agent.send(op="prepare", **request)
            if index == 0:
                agent.send(op="store", address=address)

    def wait_ready(self) -> int:
        """Wait until all agents are prepared, and the first one has opened the store.

        Returns:
            The port of the store.

        Raises:
            WorkerError: an agent did not start.
            KeyboardInterrupt: a signal came; nothing was started yet.
        """
        self.wait_for("ready", self.agents)
        return int(self.wait_for("store", self.agents[:1])[0]["port"])

    def wait_for(
        self, kind: str, agents: Sequence[AgentHandle], timeout: float = START_TIMEOUT
    ) -> list[dict[str, Any]]:
        """Wait until each of `agents` has answered with an event of this kind; their answers,
        which are taken away.
        """
        deadline = time.monotonic() + timeout
        while any(kind not in agent.answers for agent in agents):
            self._wait(min(0.5, deadline - time.monotonic()))
            if self.is_asked_to_end():
                raise KeyboardInterrupt
            late = time.monotonic() > deadline
            for agent in agents:
                if kind not in agent.answers and (agent.lost or late):
                    if agent.lost:
                        why = agent.why_gone()
                    else:
                        why = f"it did not answer within {timeout:.0f} s"
                    raise WorkerError(
                        f"the agent on {agent.host} failed before any worker was started: {why}"
                    )
        return [agent.answers.pop(kind) for agent in agents]

    def pause(self, seconds: float) -> None:
        """Look after the agents, and wait at most so long for one of them to say something."""
        self._wait(seconds)

    def close(self) -> None:
        """End the agents and release everything."""
        for agent in self.agents:
            if agent.ready is None:
                agent.kill()  # still importing, deaf to requests, and without workers
            agent.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._wake_end)

    def wake_up(self) -> None:
        """Look at once for what is to be done; safe in a signal handler and in any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_end, b"!")

    def _wait(self, longest: float = 0.5) -> None:
        for key, _ in self._selector.select(max(0.0, longest)):
            if key.data is None:
                os.read(self._wake, 4096)
                continue
            data = os.read(key.fd, CHUNK)
            if not data:
                self._lose(key.data, key.data.why_gone())
                continue
            key.data.heard_at = time.monotonic()
            for event in key.data.inbox.feed(data):
                self._hear(key.data, event)
        now = time.monotonic()
        if now - self._looked_at > 3.0:  # this process itself was suspended
            for agent in self.agents:
                agent.heard_at = now
        self._looked_at = now
        if now - self._pinged_at >= _PING_EVERY:
            self._pinged_at = now
            for agent in self.agents:
                if not agent.local and not agent.lost:
                    agent.send(op="ping")
        for agent in self.agents:
            silence = agent.long_silence(now, self.heartbeat_timeout, self.host_timeout)
            if silence is not None:
                self._lose(agent, silence)
                agent.kill()

    def _lose(self, agent: AgentHandle, why: str) -> None:
        """Nothing more will come from an agent. Its workers die with it; what they started is ended
        here."""
        if not agent.lost:
            agent.lost = agent.idle = True
            self._selector.unregister(agent.events)
            self._lost(agent, why)
