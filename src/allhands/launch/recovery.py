"""What is done about a worker or server that fails in a job whose other processes can go on without
it.

A world of collectives ends when one of its ranks does, unless the job is elastic: its workers then
make a new world of those that are left. Workers that meet only through parameter servers can go on
with fewer, or wait until the process is there again. Only the launcher knows that a process is
gone, and only it can start another one on the same host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allhands.launch.elastic_members import ElasticMembers
from allhands.launch.handle import AgentHandle
from allhands.launch.output import Output
from allhands.launch.plan import SERVER_RESTART, WORKER_RESTART
from allhands.launch.worker_report import Worker, describe_excused
from allhands.world.group import JOINS
from allhands.world.regroup import OVER_KEY, STOP_KEY

# Seconds after a loss for which a worker is not started, as the others repeat what was interrupted:
# starting it takes a core for as long as a step may take.
_START_BY_S = 5.0
# Seconds for workers that are too few to make their world, before they are told to end.
_LAST_REGROUPING_S = 60.0
# What may follow the failure of a worker.
STOP, CONTINUE, RESTART = "stop", "continue", "restart"
CHOICES = (STOP, CONTINUE, RESTART)


@dataclass
class _Excuse:
    """A failure that does not end the job."""

    then: str  # CONTINUE or RESTART
    since: float
    killed: bool = False
    settled: bool = False  # its process is gone, and that was told
    with_copy: bool = False  # it leaves, as its copy of the model has lost another worker


class Recovery:
    """Decides for one job, over all its attempts, which failures do not end it; and does what
    follows.

    Args:
        server_restarts: how many times a server is started again, all servers together.
        on_worker_failure: one of CHOICES.
        max_restarts: how many times a worker, or the whole world, is started again.
        elastic: the workers go on in another world without one that is lost, and take in one that
            is started in its place.
        least: so many workers must be left for that; fewer are told to save, and end.
        spares: so many of the workers take part only once another is missing.
        say: shows a report; without "allhands: " before it.
    """

    def __init__(
        self,
        server_restarts: int = 0,
        on_worker_failure: str = STOP,
        max_restarts: int = 0,
        say: Callable[[str], None] = lambda _: None,
        elastic: bool = False,
        least: int = 1,
        spares: int = 0,
    ) -> None:
        self.server_restarts, self.on_worker_failure = server_restarts, on_worker_failure
        self.max_restarts = max_restarts
        self.elastic, self._least, self._spares = elastic, least, spares
        self.members = ElasticMembers(self._publish)
        self.restarts = 0  # of a worker, or of the world
        self._restarted_servers = 0
        self._say = say
        self._agents: Sequence[AgentHandle] = ()
        self._workers: dict[int, Worker] = {}
        self._tasks: dict[int, Mapping[str, Any]] = {}
        self._excused: dict[int, _Excuse] = {}
        self._counts: dict[int, int] = {}  # how often a process was started again in this attempt
        # Workers that are to be started again, the change that has told of their loss, and the
        # latest time.
        self._to_begin: list[tuple[Worker, AgentHandle, int, float]] = []
        self._missed: Worker | None = None  # without which too few are left
        self._ends_by: float | None = None  # when those are told to end at the latest
        self._ends = False  # the workers were told to end
        self._over = False  # they were told that nobody goes on

    @property
    def may_act(self) -> bool:
        """Whether anything but the end of the attempt can follow a failure."""
        return bool(self.server_restarts) or self.on_worker_failure != STOP or self.elastic

    def begin(
        self,
        agents: Sequence[AgentHandle],
        workers: dict[int, Worker],
        tasks: Sequence[Sequence[Mapping[str, Any]]],
        output: Output,
        grace: float,
    ) -> None:
        """An attempt begins. `workers` is kept up to date by the caller, and a process that is
        started again gets a new entry."""
        self._agents, self._workers, self._output, self._grace = agents, workers, output, grace
        self._tasks = {task["rank"]: task for there in tasks for task in there}
        self._excused, self._counts, self._to_begin = {}, {}, []
        self._missed, self._ends_by, self._ends, self._over = None, None, False, False
        ranks = sorted(rank for rank in self._tasks if rank >= 0)
        self.members.begin(ranks, ranks[len(ranks) - self._spares :])

    def add(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Further workers are started that are to take part."""
        self._tasks |= {task["rank"]: task for task in tasks}
        self.members.add([task["rank"] for task in tasks])

    def living(self) -> int:
        """How many workers there are that take part, or will."""
        return sum(
            not worker.is_server and not self.is_over(worker)
            for worker in self._workers.values()
            if not self.members.is_spare(worker.rank)
        )

    def is_over(self, worker: Worker) -> bool:
        """Whether nothing more is to come of a worker: it ended, or is about to, and is not started
        again."""
        excuse = self._excused.get(worker.rank)
        if excuse is not None:
            return excuse.then == CONTINUE and (excuse.settled or excuse.killed)
        return worker.exit is not None or worker.lost is not None

    def blamed(self) -> list[Worker]:
        """The workers and servers whose failure ends the attempt. Of workers without which the
        others go on: all, once none is left that has not failed."""
        failed = [worker for worker in self._workers.values() if worker.failed_at() is not None]
        if self.elastic and not self.members.is_taken_up:
            # What fails before a loss is made up for, fails because of it.
            return failed if any(worker.rank not in self._excused for worker in failed) else []
        blamed = [worker for worker in failed if worker.rank not in self._excused]
        workers = [worker for worker in self._workers.values() if not worker.is_server]
        if self._missed is not None:
            over = all(self.is_over(self._workers[rank]) for rank in self.members.ranks)
            missed = [self._missed] if self._missed.failed_at() is not None else []
            return [*missed, *blamed] if over or blamed else []
        if not blamed and all(
            worker.rank in self._excused and self.is_over(worker) for worker in workers
        ):
            return failed
        return blamed

    def excused(self) -> list[Worker]:
        """The workers that failed, and without which the others went on."""
        return [
            self._workers[rank]
            for rank, excuse in self._excused.items()
            if excuse.then == CONTINUE and not excuse.with_copy
        ]

    def left_on_request(self) -> int | None:
        """The signal after which the first worker left that stopped on request, of those that the
        others did not go on without; None where there is none."""
        asked = [
            (worker.left_at(), number)
            for worker in self._workers.values()
            if not worker.is_server
            and worker.rank not in self._excused
            and (number := worker.stopped_after()) is not None
        ]
        return min(asked)[1] if asked else None

    def is_through(self) -> bool:
        """Whether all that the job does is done, and only processes are left that serve, or wait
        for their turn."""
        if self.elastic:
            ranks = self.members.ranks  # none, where one was about to join as the others ended
        elif any(worker.is_server for worker in self._workers.values()):
            ranks = [rank for rank in self._workers if rank >= 0]
        else:
            return False
        return all(self.is_over(self._workers[rank]) for rank in ranks)

    def act(self) -> None:
        """See to what has failed. To be called while no process is being stopped."""
        if not self.may_act:
            return
        if self.elastic and not self.members.is_taken_up:
            # One that has come to its end does not meet the others, who repeat what it has done.
            for rank in list(self.members.ranks):
                if self._workers[rank].exit == {"code": 0}:
                    why = f"{self._workers[rank].name} has come to its end"
                    self.members.lose(rank, why, at_end=True)
        agents = {rank: agent for agent in self._agents for rank in agent.ranks}
        # Workers before servers, which are of use only while workers run.
        for rank in sorted(agents, key=lambda rank: (rank < 0, abs(rank))):
            worker = self._workers[rank]
            if rank not in self._excused and (
                worker.failed_at() is not None or self._has_left(worker)
            ):
                then = self._verdict(worker, agents[rank])
                if then != STOP:
                    self._excused[rank] = _Excuse(then, time.monotonic())
            excuse = self._excused.get(rank)
            if excuse is not None and not excuse.settled:
                self._see_to(worker, agents[rank], excuse)
        self._begin_those_due()

    def should_end(self) -> bool:
        """Whether too few workers are left, and are to be told now to save and end."""
        return (
            self._ends_by is not None
            and not self._ends
            and (self.members.is_taken_up or time.monotonic() > self._ends_by)
        )

    def stopping(self, number: int) -> None:
        """The whole job is told to end by a signal."""
        self._ends = True
        if self.elastic:
            self._publish(STOP_KEY, str(number))

    def _publish(self, key: str, value: str) -> None:
        attempt = next(iter(self._tasks.values()))["env"]["TORCHELASTIC_RESTART_COUNT"]
        self._agents[0].send(op="publish", key=f"attempt{attempt}/{key}", value=value)

    def _has_left(self, worker: Worker) -> bool:
        """Whether a worker of an elastic job has left because it alone was told to."""
        left = worker.exit is not None and worker.stopped_after() is not None
        return self.elastic and left and not self._ends

    def _verdict_in_elastic(self, worker: Worker, agent: AgentHandle) -> str:
        members = self.members.ranks
        begins = not self.members.trains(worker.rank)
        if worker.raised is not None and begins and not worker.is_echo:
            return CONTINUE  # it does not fit the others, and would not when started again
        if worker.rank in members:
            left = self.members.left_without([*self._excused, worker.rank])
            # An exception would be raised again by those that are left.
            if worker.raised is not None and not begins:
                return STOP
            if not left:
                if self.members.copy_size > 1:
                    self._say("no whole copy of the model is left, so that the workers end")
                return STOP
            if agent.lost and agent is self._agents[0]:
                return STOP  # the store is lost with it
            if len(left) < self._least and self._missed is None:
                self._missed = worker
                self._ends_by = time.monotonic() + _LAST_REGROUPING_S
        if self._missed is not None:
            return CONTINUE
        if self._has_left(worker) or agent.lost or self.restarts == self.max_restarts:
            return CONTINUE
        self.restarts += 1
        return RESTART

    def _verdict(self, worker: Worker, agent: AgentHandle) -> str:
        if self.elastic:
            then = self._verdict_in_elastic(worker, agent)
            if then == STOP and not self._over and not self._agents[0].lost:
                self._over = True  # the others need not wait for another membership
                self._publish(OVER_KEY, worker.cause())
            return then
        if worker.is_server:
            needed = any(
                not self.is_over(other) for other in self._workers.values() if not other.is_server
            )
            if agent.lost or not needed or self._restarted_servers == self.server_restarts:
                return STOP
            self._restarted_servers += 1
            return RESTART
        if self.on_worker_failure == CONTINUE:
            # With the first host the store is lost, by which processes find one another.
            carries = agent is self._agents[0] or any(rank < 0 for rank in agent.ranks)
            return STOP if agent.lost and carries else CONTINUE
        if self.on_worker_failure == STOP or agent.lost or self.restarts == self.max_restarts:
            return STOP
        self.restarts += 1
        return RESTART

    def _lose(self, worker: Worker) -> None:
        """A worker of an elastic job is gone, and with it those of its copy of the model."""
        why = f"{worker.name} on {worker.host}: {worker.cause()}"
        may_come_back = self._missed is None and bool(self.max_restarts or self._spares)
        for rank in self.members.lose(worker.rank, why):
            if rank not in self._excused:
                then = RESTART if may_come_back else CONTINUE
                self._excused[rank] = _Excuse(then, time.monotonic(), with_copy=True)

    def _see_to(self, worker: Worker, agent: AgentHandle, excuse: _Excuse) -> None:
        if worker.exit is None and worker.lost is None:
            # One that has raised an exception is about to end by itself, and may still print.
            if not excuse.killed and (
                worker.silent is not None or time.monotonic() > excuse.since + self._grace
            ):
                excuse.killed = True
                worker.stop_at = time.monotonic()
                agent.send(op="kill", rank=worker.rank)
            return
        excuse.settled = True
        worker.tail = self._output.tail(worker.rank)
        if self.elastic:
            self._lose(worker)
        if excuse.with_copy:
            self._see_to_copy(worker, agent, excuse)
        elif excuse.then == RESTART:
            self._start_again(worker, agent)
        else:
            then = "the others go on"
            if worker is self._missed:
                left = len(self.members.ranks)
                then = (
                    f"{left} worker{'s' if left > 1 else ''} left, fewer than --min-workers "
                    f"{self._least}: told to save and end"
                )
            self._say(describe_excused(worker, then, self._output.log_path(worker.rank)))

    def _see_to_copy(self, worker: Worker, agent: AgentHandle, excuse: _Excuse) -> None:
        """A worker has left whose copy of the model has lost another one."""
        if agent.lost or self._has_left(worker):
            excuse.then = CONTINUE
        starts = excuse.then == RESTART
        then = (
            "started again, and takes part once a copy is whole" if starts else "the others go on"
        )
        self._say(
            f"{worker.name} on host {worker.host} left, as its copy of the model has lost another "
            f"worker; {then}"
        )
        if starts:
            self._begin_again(worker, agent)

    def _start_again(self, worker: Worker, agent: AgentHandle) -> None:
        number, most = (
            (self._restarted_servers, self.server_restarts)
            if worker.is_server
            else (self.restarts, self.max_restarts)
        )
        self._say(
            describe_excused(worker, f"started again ({number} of {most})", None, with_tail=False)
        )
        self._begin_again(worker, agent)

    def _begin_again(self, worker: Worker, agent: AgentHandle) -> None:
        wait = _START_BY_S if self.elastic and self.members.ranks else 0.0
        self._to_begin.append((worker, agent, self.members.epoch, time.monotonic() + wait))

    def _begin_those_due(self) -> None:
        for one in list(self._to_begin):
            worker, agent, change, by = one
            if self._ends or agent.lost:
                self._excused[worker.rank].then = CONTINUE
            elif self.members.repeated < change and time.monotonic() < by:
                continue
            else:
                self._begin(worker, agent)
            self._to_begin.remove(one)

    def _begin(self, worker: Worker, agent: AgentHandle) -> None:
        rank = worker.rank
        self._counts[rank] = self._counts.get(rank, 0) + 1
        task = self._tasks[rank]
        joins = {JOINS: "1"} if self.elastic else {}
        count = {SERVER_RESTART if worker.is_server else WORKER_RESTART: str(self._counts[rank])}
        del self._excused[rank]
        self._workers[rank] = Worker(rank, agent.host, must_return=worker.must_return)
        self._output.place(rank, "" if agent.local else agent.host)
        agent.send(op="again", worker={**task, "env": {**task["env"], **count, **joins}})
