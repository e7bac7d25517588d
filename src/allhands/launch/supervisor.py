"""Drives the agents of one job from the launcher: shows output, finds the first failure, stops the
rest, tells why."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from allhands.errors import UserError, WorkerError
from allhands.launch.agent_group import AgentGroup
from allhands.launch.handle import OVERDUE, AgentHandle
from allhands.launch.output import Output
from allhands.launch.protocol import bytes_of
from allhands.launch.recovery import Recovery
from allhands.launch.worker_report import Worker, first_of

HOST_TIMEOUT = 15.0
# Seconds that the news of a failure on another host may take longer than that of its consequence.
_LONGEST_AWAY = 5.0


class Supervisor(AgentGroup):
    """One job: the workers of all its agents.

    Args:
        agents: those that were started; `prepare` and `run` talk to them.
        output: where lines go.
        grace: seconds from SIGTERM to SIGKILL for workers that are stopped.
        heartbeat_timeout: seconds without a heartbeat that count as a failure; 0 waits for ever.
        host_timeout: seconds without a word from the agent of another host that count as the loss
            of that host; its agent takes the launcher for lost after as many.
        recovery: what is done about a failure instead of stopping all; None stops all.
        on_message: called with (rank, message) for what workers hand to `worker.send`.
        asks_first: after Ctrl-C the workers get SIGINT, and `grace` seconds to hand back what they
            have, before they are stopped.
        on_loaded: called once every worker has read what was shipped to it.
        on_tick: called about twice a second while workers run and none is being stopped.
    """

    def __init__(
        self,
        agents: Sequence[AgentHandle],
        output: Output,
        *,
        grace: float = 5.0,
        heartbeat_timeout: float = 60.0,
        host_timeout: float = HOST_TIMEOUT,
        recovery: Recovery | None = None,
        on_message: Callable[[int, dict[str, Any]], None] | None = None,
        on_loaded: Callable[[], None] | None = None,
        on_tick: Callable[[], None] | None = None,
        asks_first: bool = False,
    ) -> None:
        self.asks_first = asks_first
        self.output = output
        self.grace = grace
        self.on_message, self.on_loaded, self.on_tick = on_message, on_loaded, on_tick
        self.recovery = recovery or Recovery()
        self.workers: dict[int, Worker] = {}
        self.signals: list[int] = []  # those that the launcher got, oldest first
        self.passed: list[int] = []  # signals for the workers, oldest first
        self.kept: list[int] = []  # signals that came when no worker could take them, oldest first
        self.begun = False  # every worker of this round runs the user's code
        self._not_begun: set[int] = set()
        self._taken: set[int] = set()  # signals of `passed` that have reached a worker
        self.stopping_since: float | None = None
        # When workers that have not stopped on request are stopped.
        self._leave_by: float | None = None
        self._killed = False
        self._not_loaded: set[int] = set()
        super().__init__(agents, heartbeat_timeout, host_timeout)

    def run(
        self,
        tasks: Sequence[Sequence[dict[str, Any]]],
        *,
        must_return: bool = False,
        scratch: Sequence[str] = (),
    ) -> Worker | None:
        """Start the tasks and see them through until no process of them is left.

        Args:
            tasks: one sequence for each agent.
            must_return: the workers' tasks are functions; one that ends without a result has
                failed.
            scratch: folders that the agents remove if this process is killed before it can.

        Returns:
            The worker that failed first; None when all went well, `interrupt` ended the job, or the
            others went on to their end.

        Raises:
            BaseException: whatever is raised in the calling thread meanwhile, KeyboardInterrupt
                above all; the workers are stopped first.
        """
        self.begun = False
        self.workers, self.passed = {}, []
        self._taken.clear()
        self._not_begun = {task["rank"] for chosen in tasks for task in chosen if task["rank"] >= 0}
        self.stopping_since = self._leave_by = None
        self._killed = False
        self._not_loaded.clear()
        self.recovery.begin(self.agents, self.workers, tasks, self.output, self.grace)
        for agent, chosen in zip(self.agents, tasks, strict=True):
            self._start(agent, chosen, must_return, scratch)
            self._not_loaded.update(rank for rank in agent.ranks if rank >= 0)
        try:
            self._until_idle()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self.asks_first and self.begun:
                self._ask_to_stop()
            self._abandon()
            raise
        self.kept += [number for number in self.passed if number not in self._taken]
        for worker in self.workers.values():
            worker.tail = self.output.tail(worker.rank)
        return self.first_failure()

    def start_more(self, agent: AgentHandle, tasks: Sequence[dict[str, Any]]) -> None:
        """Start workers that join those which run, by an agent that has none."""
        self.recovery.add(tasks)
        self._start(agent, tasks)

    def _start(
        self,
        agent: AgentHandle,
        tasks: Sequence[dict[str, Any]],
        must_return: bool = False,
        scratch: Sequence[str] = (),
    ) -> None:
        agent.ranks = [task["rank"] for task in tasks]
        agent.idle = False
        for rank in agent.ranks:
            self.workers[rank] = Worker(rank, agent.host, must_return=must_return and rank >= 0)
            self.output.place(rank, "" if agent.local else agent.host)
        agent.heard_at = time.monotonic()
        agent.send(
            op="start",
            workers=list(tasks),
            heartbeat_timeout=self.heartbeat_timeout,
            scratch=scratch,
            hold=self.recovery.may_act,
        )

    def first_failure(self) -> Worker | None:
        """The worker that failed first by itself, and whose failure ends the job, as far as is
        known now."""
        return first_of(self.recovery.blamed())

    def _awaits_cause(self, first: Worker) -> bool:
        """Whether the failure of `first` may be an echo of one on another host that is not known
        yet, and is still to be waited for."""
        failed_at = first.failed_at() or 0.0
        if not first.is_echo or time.monotonic() - failed_at > _LONGEST_AWAY:
            return False
        return any(
            self.workers[rank].exit is None and self.workers[rank].failed_at() is None
            for agent in self.agents
            if first.rank not in agent.ranks and not agent.lost
            for rank in agent.ranks
        )

    def interrupt(self, number: int) -> None:
        """Stop the job because the launcher got a signal; the second one kills at once. Safe in a
        signal handler."""
        self.signals.append(number)
        self.wake_up()

    def pass_on(self, number: int) -> None:
        """Give a signal to all workers and go on waiting; with SIGTERM they have `grace` seconds to
        end. Safe in a signal handler.

        A signal that comes before all workers run the user's code, or when they have ended or are
        being stopped, is kept (`kept`). Before they do, it ends the job: nobody has anything to
        save yet.
        """
        idle = all(agent.idle for agent in self.agents)
        can_take = self.begun and self.stopping_since is None and not idle
        (self.passed if can_take else self.kept).append(number)
        self.wake_up()

    def is_asked_to_end(self) -> bool:
        """Whether a signal asks for the end of the job while no worker runs that could take it."""
        self.signals += self.kept[:1] if not self.signals else []
        return bool(self.signals)

    def stopped_by(self) -> int | None:
        """The signal that ended a job in which no worker failed; None when all workers just came to
        their end."""
        if self.signals:
            return self.signals[0]
        asked = self.recovery.left_on_request()
        return signal.SIGTERM if asked is None and signal.SIGTERM in self.passed else asked

    def stop(self, grace: float, but: int | None = None) -> None:
        """SIGTERM to the workers, and SIGKILL after `grace` seconds. Rank `but` is left to end by
        itself meanwhile."""
        now = time.monotonic()
        self.stopping_since = self.stopping_since or now
        for agent in self.agents:
            ranks = [rank for rank in agent.ranks if rank != but]
            for rank in ranks:
                if self.workers[rank].exit is None and self.workers[rank].stop_at is None:
                    self.workers[rank].stop_at = now
            agent.send(op="stop", ranks=ranks, grace=grace)

    def close(self) -> None:
        super().close()
        self.output.close()

    def _until_idle(self) -> None:
        heeded = passed = 0
        while not all(agent.idle for agent in self.agents):
            self._wait()
            if self.stopping_since is None and not self.begun:
                self.is_asked_to_end()
            while self.stopping_since is None and self.begun and self.kept:
                # It came with the news that the last of them has begun.
                self.passed.append(self.kept.pop(0))
            if len(self.signals) > heeded:
                # Ctrl-C while the workers are already being stopped means: now.
                self.stop(
                    self.grace if self.stopping_since is None and len(self.signals) == 1 else 0.0
                )
                heeded = len(self.signals)
            for number in self.passed[passed:]:
                passed += 1
                self._tell_all(number)
            if self.stopping_since is None:
                self.recovery.act()
                if self.recovery.should_end():
                    self._tell_all(signal.SIGTERM)
                first = self.first_failure()
                if first is not None:
                    if not self._awaits_cause(first):
                        # One that is raising is about to end, and its own teardown may still print.
                        self.stop(self.grace, but=first.rank if first.silent is None else None)
                elif self._some_do_not_follow():
                    self.stop(0.0 if signal.SIGTERM in self.passed else self.grace)
                else:
                    if self.recovery.is_through():
                        self.stop(self.grace)
                    if self.on_tick is not None:
                        self.on_tick()
                continue
            waited = time.monotonic() - self.stopping_since
            if waited > self.grace and not self._killed:
                self._killed = True
                self.stop(0.0)
            if waited > self.grace + OVERDUE:
                for agent in self.agents:
                    if not agent.idle:
                        agent.kill()

    def _tell_all(self, number: int) -> None:
        """Give a signal to all workers."""
        self.recovery.stopping(number)
        for agent in self.agents:
            agent.send(op="signal", number=number)
        if number == signal.SIGTERM and self._leave_by is None:
            self._leave_by = time.monotonic() + self.grace

    def _some_do_not_follow(self) -> bool:
        """Whether workers still run `grace` seconds after the first one stopped on request."""
        elastic = self.recovery.elastic and not self.passed
        if (
            self._leave_by is None
            and not elastic
            and any(worker.stopped_after() is not None for worker in self.workers.values())
        ):
            self._leave_by = time.monotonic() + self.grace
        return self._leave_by is not None and time.monotonic() > self._leave_by

    def _ask_to_stop(self) -> None:
        """After Ctrl-C, let the workers hand back what they have; a second one ends them at
        once."""
        self.passed = [signal.SIGINT]
        self._leave_by = time.monotonic() + self.grace
        try:
            self._until_idle()
        except BaseException:
            self.stop(0.0)

    def _abandon(self) -> None:
        """Stop everything after an exception in the calling thread; a second Ctrl-C kills at
        once."""
        # Whatever raised may raise again, and nothing may stand in the way of the end.
        self.on_message = self.on_loaded = self.on_tick = None
        self.output.mute()
        self.signals.append(signal.SIGINT)
        self.stop(self.grace)
        try:
            self._until_idle()
        except KeyboardInterrupt:
            self.stop(0.0)
            self._until_idle()

    def _lost(self, agent: AgentHandle, why: str) -> None:
        for rank in agent.ranks:
            self._note_begun(rank)
            self.workers[rank].lose(why, agent.local)

    def _hear(self, agent: AgentHandle, event: dict[str, Any]) -> None:
        kind = event["event"]
        at = time.monotonic() - event.get("age", 0.0)
        if kind == "ready":
            agent.ready = event
        if kind in ("ready", "store", "reached"):
            agent.answers[kind] = event
        elif kind == "idle":
            agent.idle = True
        elif kind == "asked":
            self.pass_on(event["number"])
        elif kind == "passed":
            self._taken.add(event["number"])
        elif kind == "failed":
            raise (UserError if event["op"] == "prepare" else WorkerError)(
                f"host {agent.host}: {event['text']}"
            )
        elif "rank" in event:
            self._hear_worker(self.workers[event["rank"]], kind, event, at)

    def _note_begun(self, rank: int) -> None:
        """A worker runs the user's code, or never will."""
        self._not_begun.discard(rank)
        self.begun = not self._not_begun

    def _hear_worker(self, worker: Worker, kind: str, event: dict[str, Any], at: float) -> None:
        if kind == "out":
            self.output.write(worker.rank, event["fd"], bytes_of(event["text"]))
        elif kind == "begun":
            self._note_begun(worker.rank)
        elif kind == "message":
            if self.on_message is not None:
                self.on_message(worker.rank, event["value"])
        elif kind == "joining":
            self.recovery.members.ask_to_join(worker.rank)
        elif kind == "laid_out":
            self.recovery.members.lay_out(*event["value"])
        elif kind == "taken_up":
            self.recovery.members.take_up(worker.rank, *event["value"])
        elif kind == "loaded":
            self._not_loaded.discard(worker.rank)
            if not self._not_loaded and self.on_loaded is not None:
                self.on_loaded()
        else:
            worker.note(kind, event, at)
            if kind == "exit":
                self._note_begun(worker.rank)
