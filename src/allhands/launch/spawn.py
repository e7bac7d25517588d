"""Runs a function in several workers and returns what it returned in each."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allhands import wire
from allhands.errors import UserError, WorkerError
from allhands.launch import idle_agents, records, results
from allhands.launch.job import PRELOAD
from allhands.launch.meeting import LOOPBACK
from allhands.launch.nodes import NodeFollower, other_agents
from allhands.launch.options import check_numbers
from allhands.launch.output import Output, show
from allhands.launch.plan import HostPart, tasks_of
from allhands.launch.processes import REQUESTS, restore_handlers
from allhands.launch.rendezvous import Rendezvous
from allhands.launch.shipment import Shipment
from allhands.launch.signals import pass_signals_on
from allhands.launch.supervisor import Supervisor
from allhands.launch.worker_report import Worker, describe


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: int,
    servers: int = 0,
    env: Mapping[str, str | None] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    prefix: bool = True,
    grace: float = 5.0,
    heartbeat_timeout: float = 60.0,
    threads: int | None = None,
    on_message: Callable[[int, dict[str, Any]], None] | None = None,
    preload: Sequence[str] = (),
    rendezvous: Rendezvous | None = None,
    hands_back: bool = False,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `workers` new processes that form one world.

    Works from a script without an `if __name__ == "__main__"` guard, from `python -c`, a notebook,
    pytest and any thread: the caller's file is not run again. The arguments travel as they are
    (`ship`): all workers read one copy of the tensors, and changes that a worker makes are its own.

    What the caller has set is set in the workers (`caller`): torch's defaults and flags, filters of
    warnings, levels of loggers, attributes of its own modules. Their log records reach the caller's
    handlers.

    Args:
        fn: what to call. Inside it `allhands.init()` and `torch.distributed.init_process_group()`
            find the others.
        args: positional arguments.
        kwargs: keyword arguments.
        workers: how many processes.
        servers: how many parameter servers to start beside them, with a rendezvous one a node in
            turn. They serve until the last worker has ended, and the death of one is a failure.
            `allhands.kvstore.create("dist_sync")` finds them.
        env: variables to set, or with None to remove, in all workers.
        log_dir: folder for one `rank-N.log` each.
        prefix: start every line of output with `[rank] `.
        grace: seconds from SIGTERM to SIGKILL for workers that have to be stopped, and for the
            others to follow when one has stopped on request; long enough to save.
        heartbeat_timeout: a worker that gives no sign of life for so many seconds has failed; 0
            waits for ever.
        threads: CPU threads a worker; default OMP_NUM_THREADS, or the cores divided among the
            workers.
        on_message: called with (rank, message) in this thread for everything given to
            `allhands.launch.worker.send`.
        preload: modules to import once, before the workers are forked; they must not start threads
            or touch a GPU.
        rendezvous: the tasks of other nodes that make the same call
            (`allhands.launch.rendezvous.gather`): the workers of all of them form one world. The
            results are then those of this node's workers.
        hands_back: after Ctrl-C, and the notebook's stop button, the workers get SIGINT and have
            `grace` seconds to hand back what they have (`handback.write`) and end, before
            KeyboardInterrupt is raised. A second one ends them at once.

    Returns:
        The results by rank: None, numbers, strings, bytes, tensors, numpy arrays, and lists,
        tuples, dicts and sets of them. Tensors of a GPU arrive on the CPU.

    Raises:
        UserError: an argument cannot be pickled, a result is not data, or a worker raised
            UserError.
        WorkerError: a worker failed; the message has its traceback, `rank` says which (None: a
            server), `exit_code` its exit code. No worker is left then.
        KeyboardInterrupt: and anything that `on_message` raises, after all workers were stopped.
        SystemExit: with 128 + N, after all workers have ended, when they left with that code after
            signal N (SIGTERM, SIGUSR1 or SIGUSR2), this process got SIGTERM, or it got signal N
            when no worker could take it.

    While it runs in the main thread, SIGTERM, SIGUSR1 and SIGUSR2 that would end this process are
    passed on to the workers instead, which have `grace` seconds to end after SIGTERM. One that
    comes before they run `fn`, or when they have ended, ends this process with SystemExit. A signal
    that the caller handles itself is left to that.

    With ALLHANDS_AGENT_IDLE=SECONDS in the environment, the process that imports torch and starts
    the workers waits so long for another call, which then saves the import.
    """
    check_numbers(workers, grace, heartbeat_timeout, threads, servers)
    output = Output(prefix, log_dir)
    shipment = Shipment()
    agent, key = idle_agents.take(env, threads, workers)
    prepare: dict[str, Any] = {
        "env": idle_agents.changed(),
        "cwd": os.getcwd(),
        "parent": os.getpid(),
        "local_workers": workers,
        "threads": threads,
        "preload": [*PRELOAD, "cloudpickle", *preload],
        "idle": idle_agents.idle_seconds(),
    }

    def hear(rank: int, message: dict[str, Any]) -> None:
        if not records.replay(rank, message) and on_message is not None:
            on_message(rank, message)

    try:
        if rendezvous is not None and rendezvous.node > 0:
            return _follow(
                NodeFollower(rendezvous, agent, shipment, servers),
                prepare,
                (fn, args, kwargs or {}),
            )
        others = other_agents(rendezvous, lambda: supervisor) if rendezvous is not None else []
        supervisor = Supervisor(
            [agent, *others],
            output,
            grace=grace,
            heartbeat_timeout=heartbeat_timeout,
            on_message=hear,
            asks_first=hands_back and rendezvous is None,
        )
        return _lead(
            supervisor, shipment, rendezvous, prepare, (fn, args, kwargs or {}), servers, key
        )
    finally:
        shipment.close()
        if rendezvous is not None:
            rendezvous.close()


def _lead(
    supervisor: Supervisor,
    shipment: Shipment,
    rendezvous: Rendezvous | None,
    prepare: dict[str, Any],
    call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]],
    servers: int,
    key: Any,
) -> list[Any]:
    """Start the workers of this node, and those of the tasks that follow; their results.

    Args:
        supervisor: of this node's agent and the others'.
        shipment: takes the call there and the results back.
        rendezvous: the tasks of the other nodes; None: this node is the only one.
        prepare: what the agents are asked to set up.
        call: the function and its arguments.
        servers: how many.
        key: of this node's agent, for `idle_agents`.
    """
    agent, workers = supervisor.agents[0], prepare["local_workers"]
    before = pass_signals_on(supervisor)
    returned: list[Any] = []
    is_clean = False
    try:
        supervisor.prepare(
            rendezvous.store_address if rendezvous is not None else LOOPBACK, **prepare
        )
        # The agent imports torch while the arguments are written.
        task = shipment.pack(*call)
        supervisor.on_loaded = shipment.all_loaded
        try:
            port = supervisor.wait_ready()
        except KeyboardInterrupt:
            if supervisor.signals:  # the agent got one
                raise SystemExit(128 + supervisor.signals[0]) from None
            raise
        if rendezvous is not None:
            places = rendezvous.places(servers)
        else:
            places = [HostPart(workers, range(servers), LOOPBACK)]
        here, *elsewhere = tasks_of(
            task, places, port, run_id=uuid.uuid4().hex[:12], token=wire.new_token()
        )
        first = supervisor.run(
            [shipment.with_results(here), *elsewhere], must_return=True, scratch=shipment.folders
        )
        is_clean = True
        number = supervisor.stopped_by()
        if first is None and number is None:
            # Before the agent ends, which may remove the files.
            shipment.take_back(range(workers))
            returned = [
                results.load(supervisor.workers[rank].returned or {}) for rank in range(workers)
            ]
        failure = _error(first, supervisor) if first is not None else None
        if rendezvous is not None:
            _tell(rendezvous, failure, number)
    except BaseException as error:
        if rendezvous is not None:
            _tell(rendezvous, error, None)
        elif supervisor.asks_first and isinstance(error, KeyboardInterrupt):
            shipment.take_back(range(workers))
        raise
    finally:
        # One that has an answer under way would give it to the next call.
        if is_clean and rendezvous is None and idle_agents.put_back(agent, key):
            supervisor.remove(agent)
        supervisor.close()
        restore_handlers(before)
    if supervisor.kept and number is None:
        # It came when the workers had ended, or were being stopped, and so is for this process.
        if failure is not None:
            show(sys.stderr, f"allhands: {failure}\n".encode("utf-8", "backslashreplace"))
        raise SystemExit(128 + supervisor.kept[0])
    if failure is not None:
        raise failure
    if number is not None:
        raise SystemExit(128 + number)
    return returned


def _follow(follower: NodeFollower, prepare: dict[str, Any], call: Any) -> list[Any]:
    """Start this node's workers for the task that leads."""
    agent, shipment = follower.agent, follower.shipment
    before = follower.pass_signals_on()
    try:
        agent.send(op="prepare", **prepare)
        return follower.run(shipment.pack(*call))
    except BaseException as error:
        follower.leave(error)
        raise
    finally:
        agent.close()
        restore_handlers(before)


def _tell(rendezvous: Rendezvous, failure: BaseException | None, number: int | None) -> None:
    """Tell the other nodes' tasks how it ended."""
    if (
        isinstance(failure, SystemExit)
        and isinstance(failure.code, int)
        and failure.code - 128 in REQUESTS
    ):
        rendezvous.tell(signal=failure.code - 128)
    elif failure is not None:
        code = getattr(failure, "exit_code", 1)
        text = str(failure) or type(failure).__name__
        rendezvous.tell(
            failed=text,
            user=isinstance(failure, UserError),
            rank=getattr(failure, "rank", None),
            code=code,
        )
    elif number is not None:
        rendezvous.tell(signal=number)
    else:
        rendezvous.tell()


def _error(first: Worker, supervisor: Supervisor) -> Exception:
    if first.raised is not None and first.raised.get("user_error") is not None:
        return UserError(first.raised["user_error"])
    text = describe(
        first,
        list(supervisor.workers.values()),
        supervisor.output.log_path(first.rank),
        supervisor.grace,
        with_traceback=True,
    )
    rank = None if first.is_server else first.rank
    return WorkerError(text.removeprefix("allhands: "), rank=rank, exit_code=first.exit_code())
