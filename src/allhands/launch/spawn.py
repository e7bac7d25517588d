"""Runs a function in several workers and returns what it returned in each."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allhands.errors import UserError, WorkerError
from allhands.launch import results, ship
from allhands.launch.job import LOOPBACK, PRELOAD
from allhands.launch.local import local_tasks, start_keeper
from allhands.launch.options import check_numbers
from allhands.launch.output import Output
from allhands.launch.report import Worker, describe
from allhands.launch.signals import pass_signals_on, restore
from allhands.launch.supervisor import Supervisor
from allhands.launch.unpicklable import explain, name_arguments


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: int,
    env: Mapping[str, str | None] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    prefix: bool = True,
    grace: float = 5.0,
    heartbeat_timeout: float = 60.0,
    threads: int | None = None,
    on_message: Callable[[int, dict[str, Any]], None] | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `workers` new processes that form one world.

    Works from a script without an `if __name__ == "__main__"` guard, from `python -c`, a notebook, pytest and
    any thread: the caller's file is not run again. The arguments travel as they are (`ship`): all workers
    read one copy of the tensors, and changes that a worker makes are its own.

    Args:
        fn: what to call. Inside it `allhands.init()` and `torch.distributed.init_process_group()` find the
            others.
        args: positional arguments.
        kwargs: keyword arguments.
        workers: how many processes.
        env: variables to set, or with None to remove, in all workers.
        log_dir: folder for one `rank-N.log` each.
        prefix: start every line of output with `[rank] `.
        grace: seconds from SIGTERM to SIGKILL for workers that have to be stopped, and for the others to follow when one
            has stopped on request; long enough to save.
        heartbeat_timeout: a worker that gives no sign of life for so many seconds has failed; 0 waits for
            ever.
        threads: CPU threads a worker; default OMP_NUM_THREADS, or the cores divided among the workers.
        on_message: called with (rank, message) in this thread for everything given to
            `allhands.launch.worker.send`.
        preload: modules to import once, before the workers are forked; they must not start threads or touch a
            GPU.

    Returns:
        The results by rank: None, numbers, strings, bytes, tensors, numpy arrays, and lists, tuples, dicts
        and sets of them. Tensors of a GPU arrive on the CPU.

    Raises:
        UserError: an argument cannot be pickled, a result is not data, or a worker raised UserError.
        WorkerError: a worker failed; the message has its traceback, `rank` says which, `exit_code` its exit
            code. No worker is left then.
        KeyboardInterrupt: and anything that `on_message` raises, after all workers were stopped.
        SystemExit: with 128 + N, after all workers have ended, when they left with that code after signal N (SIGTERM, SIGUSR1
            or SIGUSR2), or this process got SIGTERM.

    While it runs in the main thread, SIGTERM, SIGUSR1 and SIGUSR2 that would end this process are passed on to the workers
    instead, which have `grace` seconds to end after SIGTERM. A signal that the caller handles itself is left to that.
    """
    check_numbers(workers, grace, heartbeat_timeout, threads)
    kwargs = dict(kwargs or {})
    output = Output(prefix, log_dir)
    folders: list[str] = []

    def make_folder(nbytes: int) -> str:
        folders.append(ship.make_directory(nbytes))
        return folders[-1]

    supervisor = Supervisor([start_keeper(env)], output, grace=grace, heartbeat_timeout=heartbeat_timeout, on_message=on_message)
    before = pass_signals_on(supervisor)
    returned: list[Any] = []
    try:
        try:
            supervisor.prepare(
                LOOPBACK,
                env={},
                cwd=os.getcwd(),
                parent=os.getpid(),
                local_workers=workers,
                threads=threads,
                preload=[*PRELOAD, "cloudpickle", *preload],
            )
            # The keeper imports torch while the arguments are written.
            try:
                shipped = ship.dump((fn, tuple(args), kwargs), make_folder)
            except UserError:
                raise
            except Exception as error:
                raise explain(error, {"fn": fn, **name_arguments(fn, args, kwargs)}) from error
            supervisor.on_loaded = lambda: os.unlink(shipped)
            return_folder = make_folder(0)
            task = {
                "function": shipped,
                "sys_path": [str(entry) for entry in sys.path],
                "argv": list(sys.argv),
            }
            tasks = local_tasks(task, workers, supervisor.wait_ready())
            for one in tasks:
                one["result"] = os.path.join(return_folder, f"result-{one['rank']}")
            first = supervisor.run([tasks], must_return=True, scratch=folders)
            if first is None and supervisor.stopped_by() is None:
                # Before the keeper ends, which may remove the files.
                returned = [results.load(supervisor.workers[rank].returned or {}) for rank in range(workers)]
        finally:
            supervisor.close()
            restore(before)
        if first is not None:
            raise _error(first, supervisor, output, grace)
        number = supervisor.stopped_by()
        if number is not None:
            raise SystemExit(128 + number)
        return returned
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _error(first: Worker, supervisor: Supervisor, output: Output, grace: float) -> Exception:
    if first.raised is not None and first.raised.get("user_error") is not None:
        return UserError(first.raised["user_error"])
    text = describe(first, list(supervisor.workers.values()), output.log_path(first.rank), grace, with_traceback=True)
    return WorkerError(text.removeprefix("allhands: "), rank=first.rank, exit_code=first.exit_code())
