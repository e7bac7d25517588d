"""One job over any number of hosts: brings the agents up, runs the world, and starts it again
after a failure.

Where an agent comes from (this machine, ssh, Slurm, MPI) is the business of a `Host`; everything
else is the same for all.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from allhands import wire
from allhands.errors import AllhandsError, HostError, WorkerError
from allhands.launch.hosts import deal
from allhands.launch.job_nodes import Host, JobNode, check_versions
from allhands.launch.join_listener import JoinListener
from allhands.launch.joined_hosts import JoinedHosts
from allhands.launch.meeting import StorePlace, meet
from allhands.launch.options import Options
from allhands.launch.output import Output, show, silence_stdout
from allhands.launch.plan import Command, HostPart, further_tasks, tasks_of
from allhands.launch.processes import restore_handlers
from allhands.launch.recovery import Recovery
from allhands.launch.signals import stop_on_signals
from allhands.launch.supervisor import Supervisor
from allhands.launch.worker_report import Worker, describe, describe_end_without, describe_stop

# The last two are what torch.save and the address of a host need.
PRELOAD = (
    "torch",
    "torch.distributed",
    "numpy",
    "torch.utils.serialization.config",
    "encodings.idna",
)


class Job:
    """Runs one command on some hosts; see `run`.

    Args:
        command: what every worker runs.
        hosts: where, in the order of the ranks.
        options: how.
        slots: the bound of workers on each host; None where the user set none.

    Raises:
        UserError: an option cannot be honoured.
    """

    def __init__(
        self,
        command: Command,
        hosts: Sequence[Host],
        options: Options,
        slots: Sequence[int | None] | None = None,
    ) -> None:
        options.check()
        self.command, self.options = command, options
        slots = slots if slots is not None else [None] * len(hosts)
        counts: Sequence[int | None] = slots
        if options.workers is not None:
            names = [host.name for host in hosts]
            counts = deal(names, slots, options.workers + options.spares)
        places = [range(index, options.servers, len(hosts)) for index in range(len(hosts))]
        self.nodes = [JobNode(*one) for one in zip(hosts, counts, places, strict=True)]
        for node in [node for node in self.nodes if node.workers == 0 and not node.servers]:
            self._say(f"host {node.host.name} gets no worker")
            self.nodes.remove(node)
            node.host.close()
        self.recovery = Recovery(
            options.server_restarts,
            options.on_worker_failure,
            options.max_restarts,
            self._say,
            options.elastic,
            options.min_workers or 1,
            options.spares,
        )
        self.supervisor = Supervisor(
            [],
            Output(options.prefix, options.log_dir),
            grace=options.grace,
            heartbeat_timeout=options.heartbeat_timeout,
            host_timeout=options.host_timeout,
            recovery=self.recovery,
            on_tick=self._look_for_hosts,
        )
        self.run_id = uuid.uuid4().hex[:12]  # the same for every attempt
        self.token = wire.new_token()  # the same as well
        self._meeting: StorePlace | None = None  # of the newest attempt, as the next two
        self._attempt = self._began_with = 0
        self.joined: JoinedHosts | None = None
        self.regrouping = False  # the world is stopped only because a lost host is back

    # ------------------------------------------------------------------ the whole job

    def run(self) -> int:
        """Run it until no process of it is left on any host. Must be called in the main thread,
        because it handles signals.

        Returns:
            0 when every worker ended with 0, or the others went on without those that did not; else
            the exit code of the worker that failed first, 128 + N for a death by signal N; 128 + N
            when signal N stopped the launcher, or the workers stopped on request with that code.

        Raises:
            HostError, WorkerError: a host could not be used; nothing runs on any then.
        """
        before = stop_on_signals(self.supervisor)
        try:
            try:
                first = self._rounds()
            except KeyboardInterrupt:
                first = None
            except BrokenPipeError:
                # Whoever read our output has left, as `head` does.
                silence_stdout()
                return 128 + signal.SIGPIPE
        finally:
            self._close()
            restore_handlers(before)
        if first is not None:
            return first.exit_code()
        number = self.supervisor.stopped_by()
        workers = list(self.supervisor.workers.values())
        if number is None:
            if failed := self.recovery.excused():
                self._say(
                    describe_end_without(failed, sum(not worker.is_server for worker in workers))
                )
            return 0
        self._say(
            describe_stop(number, workers, bool(self.supervisor.signals)).removeprefix("allhands: ")
        )
        return 128 + number

    def _rounds(self) -> Worker | None:
        self._let_join()
        self._bring_up()
        attempt = 0
        while True:
            try:
                first = self._round(attempt)
            except (HostError, WorkerError) as error:
                # A host that fails while the world is set up is as lost as one that fails later.
                if self.recovery.restarts == self.options.max_restarts:
                    raise
                self._say(str(error))
                first = None
            else:
                if (
                    self.regrouping
                    and not self._has_ended()
                    and not self.supervisor.is_asked_to_end()
                ):
                    self.regrouping = False
                    self._take_in_again()
                    attempt += 1
                    continue
                if first is None:
                    return None
                self._report(first)
            if self.recovery.restarts == self.options.max_restarts or self.supervisor.signals:
                return first
            if self.supervisor.is_asked_to_end():
                # by a signal that came when the workers were being stopped, or later
                raise KeyboardInterrupt
            self.recovery.restarts += 1
            attempt += 1
            self._recover(f"restart {self.recovery.restarts} of {self.options.max_restarts}")

    def _has_ended(self) -> bool:
        """Whether all workers came to their end by themselves, before they were asked to stop for a
        host that is back."""
        workers = [worker for worker in self.supervisor.workers.values() if not worker.is_server]
        return all(worker.exit == {"code": 0} and worker.own_end for worker in workers)

    def _report(self, first: Worker) -> None:
        log = self.supervisor.output.log_path(first.rank)
        workers = list(self.supervisor.workers.values())
        text = describe(first, workers, log, self.options.grace, with_traceback=False)
        show(sys.stderr, text.encode("utf-8", "backslashreplace") + b"\n")

    # ------------------------------------------------------------------ hosts

    def _let_join(self) -> None:
        """Listen for hosts that join, where they may."""
        if self.options.max_workers is None:
            return
        self.joined = JoinedHosts(
            self.supervisor,
            self.recovery,
            self.options,
            JoinListener(self.token, self.options.log_dir, self.supervisor.wake_up),
            self._preload(),
            self._further_tasks,
            self.nodes,
            self._say,
        )
        self.joined.announce()

    def _further_tasks(self, place: HostPart, beside: int) -> list[dict[str, Any]]:
        """What a host starts that joins, on whose machine there are workers already."""
        assert self._meeting is not None
        tasks = further_tasks(
            self.command.task(),
            place,
            self._meeting.port,
            self.run_id,
            self.token,
            self._attempt,
            first_rank=max(self.supervisor.workers) + 1,
            local_first=beside,
            node_rank=len(self.nodes),
            began_with=self._began_with,
        )
        for task in tasks:
            task["env"] |= self.options.env_worker
        return tasks

    def _bring_up(self) -> None:
        for node in self.nodes:
            node.begin()
        self._wait_while(lambda: any(node.is_starting for node in self.nodes))
        troubles = [node.trouble for node in self.nodes if node.trouble is not None]
        if troubles:
            self._refuse(troubles)
        self._take_in()

    def _wait_while(self, condition: Callable[[], bool]) -> None:
        while condition():
            self.supervisor.pause(0.02)
            if self.supervisor.is_asked_to_end():
                raise KeyboardInterrupt

    @staticmethod
    def _refuse(troubles: Sequence[Exception]) -> None:
        """Raise the one trouble, or all of them in one."""
        for trouble in troubles:
            if not isinstance(trouble, AllhandsError):
                raise trouble
        if len(troubles) == 1:
            raise troubles[0]
        raise WorkerError("\n".join(str(trouble) for trouble in troubles), exit_code=2)

    def _take_in(self) -> None:
        """Prepare the agents that have come up, and let them take part from the next round on."""
        new = [
            node
            for node in self.nodes
            if node.agent is not None and node.agent not in self.supervisor.agents
        ]
        for node in new:
            assert node.agent is not None
            self.supervisor.add(node.agent)
            local = node.host.local
            node.agent.send(
                op="prepare",
                env={},
                cwd=None if local else self.options.cwd,
                parent=os.getpid() if local else None,
                local_workers=node.workers,
                threads=self.options.threads,
                preload=self._preload(),
                launcher_timeout=0.0 if local else self.options.host_timeout,
            )
        ready = self.supervisor.wait_for(
            "ready", [node.agent for node in new if node.agent is not None]
        )
        for node, told in zip(new, ready, strict=True):
            if node.workers is None:
                node.workers = told["gpus"] or told["cores"]
        check_versions(self.nodes)

    def _preload(self) -> list[str]:
        """Modules that an agent imports before it forks the processes of this job."""
        if not self.options.preload or self.command.kind == "program":
            return []
        # An optimizer imports the compiler: more than a second each, while the others wait.
        return [*PRELOAD, *(("torch._dynamo",) if self.options.servers else ())]

    def _take_in_again(self) -> None:
        """Take in hosts that came back. One that is not fit for it any more is dropped, and the
        others go on."""
        new = [
            node
            for node in self.nodes
            if node.agent is not None and node.agent not in self.supervisor.agents
        ]
        try:
            self._take_in()
        except (AllhandsError, OSError) as error:
            self._say(f"{error}; going on without {', '.join(node.host.name for node in new)}")
            for node in new:
                self._drop(node)

    # ------------------------------------------------------------------ one round

    def _here(self) -> list[JobNode]:
        """The nodes that take part, in the order of the ranks; the supervisor's agents are put
        into the same order."""
        nodes = [
            node
            for node in self.nodes
            if node.agent in self.supervisor.agents and node.agent is not None
        ]
        self.supervisor.agents = [node.agent for node in nodes if node.agent is not None]
        return nodes

    def _round(self, attempt: int) -> Worker | None:
        nodes = self._here()
        shares = [(node.workers or 0, self._servers(at, nodes)) for at, node in enumerate(nodes)]
        meeting, places = meet(self.supervisor, shares, self.joined is not None, self._say)
        self._meeting, self._attempt = meeting, attempt
        self._began_with = sum(place.workers for place in places) - self.options.spares
        if self.joined is not None:
            self.joined.begin(meeting)
        tasks = tasks_of(
            self.command.task(),
            places,
            meeting.port,
            run_id=self.run_id,
            restarts=attempt,
            token=self.token,
            on_worker_failure=self.options.on_worker_failure,
            elastic=self.options.elastic,
            spares=self.options.spares,
        )
        for task in itertools.chain(*tasks):
            task["env"] |= self.options.env_server if task["rank"] < 0 else self.options.env_worker
        return self.supervisor.run(tasks)

    def _servers(self, index: int, nodes: Sequence[JobNode]) -> list[int]:
        """The servers of a node; those of absent hosts are dealt to the hosts that are there."""
        if len(nodes) == len(self.nodes):
            return nodes[index].servers
        return list(range(index, self.options.servers, len(nodes)))

    # ------------------------------------------------------------------ after a failure

    def _recover(self, title: str) -> None:
        """Bring back the hosts that were lost."""
        lost = [node for node in self.nodes if node.agent is None or node.agent.lost]
        if not lost:
            self._say(f"{title}: the same hosts again")
            return
        names = ", ".join(node.host.name for node in lost)
        self._say(
            f"{title}: waiting up to {self.options.rejoin_timeout:g} s for {names} to come back"
        )
        for node in lost:
            self._drop(node)
            if node.joined:
                self.nodes.remove(node)
        lost = [node for node in lost if not node.joined]
        deadline = time.monotonic() + self.options.rejoin_timeout

        def still_waiting() -> bool:
            away = [node for node in lost if node.agent is None]
            for node in away:
                if not node.is_starting and time.monotonic() > node.next_try:
                    node.begin()
            return bool(away) and time.monotonic() < deadline

        self._wait_while(still_waiting)
        self._take_in_again()
        away = [node for node in lost if node.agent is None]
        left = sum(node.workers or 0 for node in self.nodes if node.agent is not None)
        if not away:
            self._say(f"{names} came back")
            return
        names = ", ".join(node.host.name for node in away)
        reasons = "; ".join(str(node.trouble) for node in away if node.trouble is not None)
        gone = (
            f"{names} did not come back within {self.options.rejoin_timeout:g} "
            f"s{f' ({reasons})' if reasons else ''}"
        )
        least = self.options.min_workers
        if least is None or left < least or not left:
            if least is None:
                need = "all are needed (--min-workers lets it go on with fewer)"
            else:
                need = f"{least} are needed"
            raise WorkerError(f"{gone}; workers left: {left}, and {need}", exit_code=1)
        self._say(
            f"{gone}; going on with {left} workers, and with all of them as soon as it is back"
        )

    def _drop(self, node: JobNode) -> None:
        if node.agent is not None:
            if node.agent in self.supervisor.agents:
                self.supervisor.remove(node.agent)
            node.agent.kill()
            node.agent.close(2.0)
            node.agent = None

    def _look_for_hosts(self) -> None:
        if self.joined is not None:
            self.joined.look()
        self._look_for_lost_hosts()

    def _look_for_lost_hosts(self) -> None:
        """While a round runs with fewer hosts: once a lost one is back, the workers are asked to
        save and the world grows."""
        if self.regrouping or self.options.min_workers is None:
            return
        for node in self.nodes:
            if node.agent is None and not node.is_starting and time.monotonic() > node.next_try:
                node.begin()
            elif (
                node.agent is not None
                and node.agent not in self.supervisor.agents
                and not node.is_starting
            ):
                self._say(
                    f"{node.host.name} is back; the workers are asked to save, and all start again "
                    "together"
                )
                self.regrouping = True
                self.supervisor.stop(self.options.grace)
                return

    # ------------------------------------------------------------------ ends

    def _close(self) -> None:
        if self.joined is not None:
            self.joined.close()
        for node in self.nodes:
            if node.agent is not None and node.agent not in self.supervisor.agents:
                node.agent.kill()
                node.agent.close(2.0)
        self.supervisor.close()
        for node in self.nodes:
            node.host.close()

    @staticmethod
    def _say(text: str) -> None:
        show(sys.stderr, f"allhands: {text}\n".encode("utf-8", "backslashreplace"))
