"""Hosts that join an elastic job while it runs, from their asking to the start of their workers.

All is done in the launcher's main thread, in small pieces between two looks at the workers that
run, which are not kept waiting.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from allhands.errors import HostError
from allhands.launch.agent_group import START_TIMEOUT
from allhands.launch.handle import AgentHandle
from allhands.launch.job_nodes import JobNode, other_version
from allhands.launch.join_listener import JoinedAgent, JoinListener, accept, refuse
from allhands.launch.meeting import StorePlace, unreached
from allhands.launch.options import Options
from allhands.launch.plan import HostPart
from allhands.launch.python import versions
from allhands.launch.recovery import Recovery
from allhands.launch.supervisor import Supervisor

_LONGEST_NAME = 255


class JoinedHost:
    local = False

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self) -> AgentHandle:
        """Only its user can start it."""
        raise HostError(self.name, "it had joined by `allhands join`; type that there again")

    def close(self) -> None:
        """Nothing has to be let go of."""


@dataclass
class _Coming:
    """A host that may join, and whose workers do not run yet."""

    agent: JoinedAgent
    workers: int
    since: float
    asked: bool = False  # how it reaches the store


class JoinedHosts:
    """Lets hosts into one job.

    Args:
        supervisor, recovery, options: of the job.
        listener: where they ask.
        preload: modules that an agent imports.
        tasks: gives the tasks of further workers, from their host's part of the job, and how many
            workers its machine has already.
        nodes: of the job; a host that has joined is added.
        say: shows a report, without "allhands: " before it.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        recovery: Recovery,
        options: Options,
        listener: JoinListener,
        preload: Sequence[str],
        tasks: Callable[[HostPart, int], list[dict[str, Any]]],
        nodes: list[JobNode],
        say: Callable[[str], None],
    ) -> None:
        self._supervisor, self._recovery, self._options = supervisor, recovery, options
        self._listener, self._preload, self._tasks = listener, list(preload), tasks
        self._nodes, self._say = nodes, say
        self._coming: list[_Coming] = []
        self._meeting: StorePlace | None = None

    def announce(self) -> None:
        """Begin to listen, and say what is typed elsewhere."""
        self._listener.start()
        first, *others = self._listener.commands
        self._say(
            f"up to {self._options.max_workers} workers. On another machine, with the token's file "
            f"and in a folder with the same script: {first}"
        )
        if others:
            places = ", ".join(command.split()[2] for command in others)
            self._say(f"this machine is also {places}")

    def begin(self, meeting: StorePlace) -> None:
        """An attempt begins. Hosts whose workers do not run yet join it later."""
        self._meeting = meeting
        for one in self._coming:
            one.asked = False

    def look(self) -> None:
        """See to those that have come. To be called while no process is being stopped."""
        for link, said in self._listener.came():
            self._admit(link, said)
        for one in list(self._coming):
            if one.agent not in self._supervisor.agents:  # another attempt has begun
                self._supervisor.agents.append(one.agent)
            try:
                self._advance(one)
            except HostError as error:
                self._drop(one, str(error))
        for node in [node for node in self._nodes if node.joined]:
            self._let_go(node)

    def close(self) -> None:
        """The job is over."""
        self._listener.close()
        for one in list(self._coming):
            self._drop(one, "the job has ended")

    # ------------------------------------------------------------------ one host

    def _why_not(self, said: dict[str, Any]) -> str:
        theirs = {str(what): str(version) for what, version in said["versions"].items()}
        workers = int(said["workers"])
        if what := other_version(theirs, versions()):
            return f"it has {what[0]} {what[1]}, and the launcher has {what[2]}; install the same"
        assert self._options.max_workers is not None
        there = self._recovery.living() + sum(one.workers for one in self._coming)
        if there + workers > self._options.max_workers:
            return (
                f"the job has {there} workers, and {workers} more would be over "
                f"--max-workers {self._options.max_workers}"
            )
        return ""

    def _admit(self, link: socket.socket, said: dict[str, Any]) -> None:
        try:
            host = str(said["host"])[:_LONGEST_NAME]
            why, workers = self._why_not(said), int(said["workers"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            refuse(link, f"its request is not understood ({type(error).__name__}: {error})")
            return
        if why:
            refuse(link, why)
            self._say(f"host {host} may not join: {why}")
            return
        agent = accept(link, host)
        self._supervisor.add(agent)
        agent.send(
            op="prepare",
            env=dict(self._options.env_joined),
            cwd=None,
            parent=None,
            local_workers=workers,
            threads=self._options.threads,
            preload=self._preload,
            launcher_timeout=self._options.host_timeout,
        )
        self._coming.append(_Coming(agent, workers, time.monotonic()))

    def _beside(self, agent: AgentHandle) -> int:
        """How many workers there are on the machine of an agent."""
        assert agent.ready is not None
        return sum(
            len(other.ranks)
            for other in self._supervisor.agents
            if other.ready is not None and other.ready["machine"] == agent.ready["machine"]
        )

    def _advance(self, one: _Coming) -> None:
        agent, host, meeting = one.agent, one.agent.host, self._meeting
        if agent.lost:
            raise HostError(host, agent.why_gone())
        if agent.inbox.trouble:
            raise HostError(host, agent.inbox.trouble)
        if time.monotonic() - one.since > START_TIMEOUT:
            raise HostError(host, f"it was not ready within {START_TIMEOUT:.0f} s")
        if agent.ready is None or meeting is None:
            return
        first = self._supervisor.agents[0]
        if first.ready is not None and first.ready["machine"] == agent.ready["machine"]:
            self._start(one, meeting.local)
        elif not one.asked:
            one.asked = True
            agent.answers.pop("reached", None)
            agent.send(op="reach", addresses=list(meeting.addresses), port=meeting.port)
        elif (told := agent.answers.pop("reached", None)) is not None:
            if told["address"] is None:
                raise unreached(host, first.host, told["tried"])
            self._start(one, told["address"])

    def _start(self, one: _Coming, address: str) -> None:
        self._coming.remove(one)
        place = HostPart(one.workers, [], address)
        tasks = self._tasks(place, self._beside(one.agent))
        ranks = ", ".join(str(task["rank"]) for task in tasks)
        self._say(f"host {one.agent.host} joins with rank{'s' * (len(tasks) > 1)} {ranks}")
        node = JobNode(JoinedHost(one.agent.host), one.workers, [])
        node.agent, node.joined = one.agent, True
        self._nodes.append(node)
        self._supervisor.start_more(one.agent, tasks)

    def _let_go(self, node: JobNode) -> None:
        """Let go of a host whose workers have failed, or left, and are not started again."""
        agent = node.agent
        if not isinstance(agent, JoinedAgent) or agent not in self._supervisor.agents:
            return
        workers = [self._supervisor.workers[rank] for rank in agent.ranks]
        over = all(self._recovery.is_over(worker) for worker in workers)
        causes = [f"{one.name}: {one.cause()}" for one in workers if one.exit != {"code": 0}]
        if over and causes:
            self._supervisor.remove(agent)
            self._nodes.remove(node)
            agent.dismiss("; ".join(causes))

    def _drop(self, one: _Coming, why: str) -> None:
        self._coming.remove(one)
        if one.agent in self._supervisor.agents:
            self._supervisor.remove(one.agent)
        one.agent.dismiss(why)
        self._say(f"{why}; it does not join")
