"""One world from several tasks that something else (srun) has started, one on each node, each with
workers of its own.

Every task runs the caller's script, so each has the function and its arguments, and sends them to
the workers of its own node. The task of node 0 *leads*: its supervisor looks after the workers of
all nodes. The others *follow*: they pass on the events of their agent, and the leader's requests. A
failure anywhere thus ends all nodes, and is reported once, as in any other job.

The tasks meet on a port that they compute from the step's name (see `allhands.world.discovery`) and
talk over one connection each. Without ALLHANDS_TOKEN nobody vouches for the other end of it, so a
follower never does what a leader could only ask for in bad faith: it accepts numbers (where the
store is, when to stop, which signal), and builds what its workers run from what its own task holds.
The secret of a job with servers is such a number too. It keeps out other users' programs that find
a server's port, not somebody who reads the network between the nodes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from allhands import wire
from allhands.errors import UserError, WorkerError
from allhands.launch import results
from allhands.launch.handle import AgentHandle
from allhands.launch.plan import tasks_of
from allhands.launch.processes import REQUESTS, set_handlers
from allhands.launch.protocol import CHUNK, write_all
from allhands.launch.rendezvous import Rendezvous
from allhands.launch.shipment import Shipment
from allhands.launch.supervisor import HOST_TIMEOUT, Supervisor
from allhands.wire import TOKEN, LineReader, encode

# A signal that reaches all tasks is passed on by the leader; one that reaches a follower alone, so
# much later by its word.
_HEARD_TOO = 0.5

# ---------------------------------------------------------------------- on the leader


def other_agents(
    rendezvous: Rendezvous, supervisor_of: Callable[[], Supervisor]
) -> list[AgentHandle]:
    """The agents of the other nodes; `supervisor_of` gives, later, the one that looks after
    them."""
    return [
        NodeHandle(link, host, supervisor_of)
        for link, host in zip(rendezvous.links, rendezvous.hosts[1:], strict=True)
    ]


class SocketProcess:
    """A connection in the place of an agent's process: a socket to write to, and a pipe to read
    from that ends with it."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.stdin = link
        read, self._write = os.pipe()
        self.stdout = os.fdopen(read, "rb", buffering=0)
        self._thread = threading.Thread(target=self._pump, name="allhands-node", daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.link.recv(CHUNK):
                write_all(self._write, data)
        os.close(self._write)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        self.kill()
        self._thread.join(timeout)
        return 0


class NodeHandle(AgentHandle):
    """The agent of another node, through the task there."""

    def __init__(
        self, link: socket.socket, host: str, supervisor_of: Callable[[], Supervisor]
    ) -> None:
        super().__init__(cast(Any, SocketProcess(link)), host, local=False)
        self.inbox: _NodeReader = _NodeReader(supervisor_of)

    def send(self, **request: Any) -> None:
        """Ask for something; what only the task there can know is left to it."""
        if request["op"] == "prepare":
            return
        if request["op"] == "start":
            env = request["workers"][0]["env"]
            request = {
                "op": "start",
                "port": int(env["MASTER_PORT"]),
                "run_id": env["TORCHELASTIC_RUN_ID"],
                "heartbeat_timeout": request["heartbeat_timeout"],
                "servers": int(env["ALLHANDS_NUM_SERVERS"]),
                "token": env[TOKEN],
            }
        super().send(**request)

    def why_gone(self) -> str:
        """Why nothing more comes from it."""
        return (
            self.inbox.gone
            or f"the task on host {self.host} is gone: it was killed, or its network is down"
        )


class _NodeReader(LineReader):
    """Takes out what the task of another node says of itself."""

    def __init__(self, supervisor_of: Callable[[], Supervisor]) -> None:
        super().__init__()
        self._supervisor_of = supervisor_of
        self.gone = ""  # why it leaves

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages of the agent that `data` completes."""
        messages = super().feed(data)
        for message in messages:
            if message["event"] == "signal" and message["number"] in REQUESTS:
                threading.Timer(_HEARD_TOO, self._pass_on, (message["number"],)).start()
            elif message["event"] == "gone":
                self.gone = str(message["why"])
        return [message for message in messages if message["event"] not in ("signal", "gone")]

    def _pass_on(self, number: int) -> None:
        supervisor = self._supervisor_of()
        if number not in (*supervisor.passed, *supervisor.kept):
            supervisor.pass_on(number)


# ---------------------------------------------------------------------- on the others


class NodeFollower:
    """This node's agent, as the leader sees it."""

    def __init__(
        self, rendezvous: Rendezvous, agent: AgentHandle, shipment: Shipment, servers: int = 0
    ) -> None:
        self.rendezvous, self.agent, self.shipment = rendezvous, agent, shipment
        self.servers = servers
        self.link = rendezvous.links[0]
        self.host = rendezvous.hosts[rendezvous.node]
        self.leader = rendezvous.hosts[0]
        self.returned: dict[int, dict[str, Any]] = {}
        self.started = False
        self._loaded = 0
        self._inbox = LineReader()
        self._end: dict[str, Any] | None = None
        self._heard = time.monotonic()

    def pass_signals_on(self) -> dict[int, Any]:
        """Tell the leader of SIGTERM, SIGUSR1 and SIGUSR2 instead of ending by them; returns the
        handlers that stood before."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        return set_handlers(REQUESTS, self._on_signal, of_users=False)

    def leave(self, error: BaseException) -> None:
        """Tell the leader why this task cannot go on."""
        self._tell(
            {
                "event": "gone",
                "why": str(error) or f"the task there ended by {type(error).__name__}",
            }
        )

    def _on_signal(self, number: int, _: Any) -> None:
        self._tell({"event": "signal", "number": number})

    def run(self, task: dict[str, Any]) -> list[Any]:
        """Start the workers of this node when the leader says so, and see them through; returns
        their results by local rank.

        Raises:
            UserError, WorkerError, SystemExit: as on the leader; and WorkerError when the leader is
                gone.
        """
        selector = selectors.DefaultSelector()
        selector.register(self.link, selectors.EVENT_READ, "leader")
        selector.register(self.agent.events, selectors.EVENT_READ, "agent")
        suspension = wire.Suspension(3.0)
        with selector:
            while self._end is None:
                for key, _ in selector.select(1.0):
                    if key.data == "leader":
                        self._hear_leader(task)
                    elif not self._hear_agent():
                        raise WorkerError(f"the agent process on host {self.host} ended by itself")
                now = time.monotonic()
                if suspension.ended(now):
                    self._heard = now
                if self.started and now - self._heard > HOST_TIMEOUT:
                    raise WorkerError(
                        f"no word from the task on {self.leader}, which leads, for "
                        f"{now - self._heard:.0f} s"
                    )
        return self._outcome(self._end)

    def _hear_leader(self, task: dict[str, Any]) -> None:
        try:
            data = self.link.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            raise WorkerError(
                f"the task on {self.leader}, which leads, is gone: it was killed, or its network "
                "is down"
            )
        self._heard = time.monotonic()
        for message in self._inbox.feed(data):
            op = message["op"]
            if op == "start":
                self._start(task, message)
            elif op == "stop":
                ranks = message["ranks"]
                self.agent.send(
                    op="stop",
                    ranks=None if ranks is None else [int(rank) for rank in ranks],
                    grace=float(message["grace"]),
                )
            elif op == "signal" and message["number"] in REQUESTS:
                self.agent.send(op="signal", number=message["number"])
            elif op == "end":
                self._end = message

    def _start(self, task: dict[str, Any], request: dict[str, Any]) -> None:
        if request["servers"] != self.servers:
            raise UserError(
                f"{self.host} was called with servers={self.servers}, but {self.leader} with "
                f"servers={request['servers']}; every node must make the same call"
            )
        places, port, run_id = (
            self.rendezvous.places(self.servers),
            int(request["port"]),
            str(request["run_id"]),
        )
        tasks = tasks_of(task, places, port, run_id, token=str(request["token"]))[
            self.rendezvous.node
        ]
        self.agent.ranks = [one["rank"] for one in tasks]
        self.started = True
        self.agent.send(
            op="start",
            workers=self.shipment.with_results(tasks),
            heartbeat_timeout=float(request["heartbeat_timeout"]),
            scratch=self.shipment.folders,
        )

    def _hear_agent(self) -> bool:
        data = os.read(self.agent.events, CHUNK)
        for event in self.agent.inbox.feed(data):
            if event["event"] == "ready":
                self.agent.ready = event
            elif event["event"] == "returned":
                self.returned[event["rank"]] = event["value"]
                event["value"] = {}  # the file is for this task
            elif event["event"] == "loaded":
                self._loaded += 1
                if self._loaded == self.rendezvous.counts[self.rendezvous.node]:
                    self.shipment.all_loaded()
            self._tell(event)
        return bool(data)

    def _tell(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.link.sendall(encode(event))

    def _outcome(self, end: dict[str, Any]) -> list[Any]:
        if "signal" in end:
            raise SystemExit(128 + int(end["signal"]))
        if "failed" in end:
            if end.get("user"):
                raise UserError(str(end["failed"]))
            text = str(end["failed"]).partition("\n")[0]
            raise WorkerError(
                f"{text} (more in the output of {self.leader})",
                rank=end.get("rank"),
                exit_code=int(end.get("code", 1)),
            )
        self.shipment.take_back(self.agent.ranks)
        return [results.load(self.returned.get(rank, {})) for rank in self.agent.ranks if rank >= 0]
