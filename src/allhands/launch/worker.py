"""What happens in a worker between its fork from the agent and the user's first line, and after
the last one.

A script must not be able to tell that it runs in a process that was forked with torch imported
instead of one that `python script.py` started: `__main__`, `sys.argv`, `sys.path`, signals, exit
codes and teardown are Python's own. The worker also tells the agent what only it can know: that it
is alive (once a second), and which exception ended it, at the moment it is raised. The teardown of
an interpreter can take seconds, and the other workers fail meanwhile; without the time of the
raise, the wrong one would be named as the first.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import io
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from allhands import compat
from allhands.launch import horovod_alias, processes
from allhands.launch.protocol import write_all
from allhands.wire import encode

BEAT_EVERY = 1.0


class _AgentPipe:
    """The pipe to the agent."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.pid = os.getpid()
        self.lock = threading.Lock()

    def send(self, message: dict[str, Any], longest_wait: float = -1) -> bool:
        data = encode(message)
        if not self.lock.acquire(timeout=longest_wait):
            return False
        try:
            write_all(self.fd, data)
        except OSError:
            return False
        finally:
            self.lock.release()
        return True


_link: _AgentPipe | None = None
# The file that this process runs, and a digest of its contents; "" where it runs none.
program: tuple[str, str] = ("", "")
# What the user's program gave to sys.exit, once it has; exit handlers cannot ask Python for it.
exit_code: int | None = None
# Threads that may wait for ever for a rank that is gone. The end of the process joins none.
stuck_threads: set[threading.Thread] = set()


def active() -> bool:
    """Whether this process is a worker of the allhands launcher (and not a child that a worker
    started)."""
    return _link is not None and _link.pid == os.getpid()


def send(message: dict[str, Any]) -> bool:
    """Hand a message to the process that started the workers, which sees it in `on_message(rank,
    message)`.

    Returns:
        False when nobody listens: the process was not started by the allhands launcher, or the
            launcher is
        gone.

    Raises:
        TypeError: the message holds something that JSON cannot carry.
    """
    if _link is None or not active():
        return False
    return _link.send({"message": message})


def ask_to_join() -> None:
    """Tell the launcher of an elastic job that this process can take part."""
    _report({"joining": True})


def lay_out(copy_size: int, copy_runs: int) -> None:
    """Tell the launcher of an elastic job that so many workers hold the model once, together, and
    in how many runs of consecutive ranks."""
    _report({"laid_out": [copy_size, copy_runs]})


def take_up(epoch: int, repeated: bool = False) -> None:
    """Tell the launcher of an elastic job that this process trains in the membership of this
    number; `repeated`: and has repeated what a loss had interrupted."""
    _report({"taken_up": [epoch, repeated]})


def fail(message: str) -> NoReturn:
    """End this process at once with exit code 1, from any thread or a signal handler, when its main
    thread cannot go on.

    In a worker of the allhands launcher this counts as a `WorldError` that the worker raised, with
    the place of the main thread as its traceback: `spawn` raises `WorkerError` with it, `allhands
    launch` reports it as the cause. Elsewhere the message is printed to stderr. Exit handlers do
    not run, because the main thread may hold what they wait for; output that Python still buffers
    is written.

    Args:
        message: one line.
    """
    from allhands.errors import WorldError

    at = time.monotonic()
    raised = _describe(WorldError(message))
    raised["traceback"] = _stack_of_main_thread() + raised["traceback"]
    # The main thread may be in the middle of a report, with a signal handler on top of it that
    # waits here.
    if (
        _link is None
        or not active()
        or not _link.send({"raised": raised, "at": at}, longest_wait=2.0)
    ):
        with contextlib.suppress(Exception):
            os.write(2, f"allhands: {message}\n".encode("utf-8", "backslashreplace"))
    # The main thread may hold the lock of a stream that nobody reads.
    flusher = threading.Thread(target=_flush, daemon=True)
    flusher.start()
    flusher.join(2.0)
    os._exit(1)


def _stack_of_main_thread() -> str:
    frames = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    ours = [
        index
        for index, frame in enumerate(frames)
        if frame.filename == __file__ and frame.name.startswith(("_run_", "run_"))
    ]
    return "The main thread was here:\n" + "".join(
        traceback.format_list(frames[ours[-1] + 1 if ours else 0 :])
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _report(message: dict[str, Any]) -> None:
    if _link is not None:
        _link.send(message)


def enter(
    task: dict[str, Any], parent: int, streams: Sequence[int], private: Iterable[int]
) -> None:
    """Turn a fresh fork of the agent into the worker of `task`; does not return for a program.

    `streams` are the writing ends for stdout, stderr and reports; `private` are descriptors of the
    agent.
    """
    global _link
    os.setsid()
    processes.die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is not signal.SIG_IGN:
            # A server has nothing to save, and is needed by the workers that do.
            signal.signal(number, signal.SIG_DFL if task["rank"] >= 0 else signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes.take_signals()
    out, err, reports = streams
    os.dup2(out, 1)
    os.dup2(err, 2)
    for fd in (out, err, *private):
        os.close(fd)
    os.environ.update(task["env"])
    if "torch" in sys.modules:
        # It was imported with another number. The first call in a fork also renews PyTorch's pool
        # of threads, and fails where two threads make it at the same time.
        torch = sys.modules["torch"]
        torch.set_num_threads(int(task["env"].get("OMP_NUM_THREADS", torch.get_num_threads())))
    horovod_alias.set_variables(task.get("horovod", {}))
    for name, value in task.get("defaults", {}).items():
        os.environ.setdefault(name, value)
    _link = _AgentPipe(reports)
    if "program" in task:
        _execute(task["program"])


def _execute(argv: list[str]) -> None:
    try:
        # Python ignores these; a program that inherits that would never notice a closed pipe.
        for name in ("SIGPIPE", "SIGXFSZ"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    except OSError as error:
        _report(
            {
                "raised": {"text": f"cannot run {argv[0]!r}: {error.strerror}"},
                "at": time.monotonic(),
            }
        )
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def run(task: dict[str, Any]) -> None:
    """Run the user's code in this process and leave as Python would: call it last, from the bottom
    of the stack.

    Raises:
        SystemExit: with the code of the user's program.
        KeyboardInterrupt: the program was interrupted; Python then ends with SIGINT.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # numpy's global generator was seeded once, in the agent; in processes of their own each would
    # have its own seed.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    threading.Thread(target=_beat, name="allhands-heartbeat", daemon=True).start()
    global exit_code
    code: int
    try:
        if "function" in task:
            _run_function(task)
        else:
            _report({"begun": True})
            if "module" in task:
                _run_module(task["module"], task["args"])
            else:
                run_script(task["script"], task["args"])
        _report({"leaving": 0, "at": time.monotonic()})
        if _leaves_the_interpreter_up(task):
            _end(0)
        return
    except SystemExit as leave:
        code = leave.code & 0xFF if isinstance(leave.code, int) else 0 if leave.code is None else 1
        exit_code = code
        _report({"leaving": code, "at": time.monotonic()})
        if _leaves_the_interpreter_up(task):
            if not isinstance(leave.code, int | None):
                print(leave.code, file=sys.stderr)
            _end(code)
        raise
    except BaseException as error:
        at = time.monotonic()
        error.__traceback__ = _users_part(error.__traceback__)
        # The report lets the launcher stop this process, which first says what has happened.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _report({"raised": _describe(error), "at": at})
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        # The report of a function's failure carries its traceback to the caller, who shows it.
        if "function" not in task:
            sys.excepthook(type(error), error, error.__traceback__)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        interrupted = isinstance(error, KeyboardInterrupt)
        if _leaves_the_interpreter_up(task):
            _end(1, signal.SIGINT if interrupted else None)
        if interrupted:
            sys.excepthook = lambda *_: None
            raise
    sys.exit(1)


def _leaves_the_interpreter_up(task: dict[str, Any]) -> bool:
    """Functions always end so, and programs that may have threads of PyTorch's (see `_end`)."""
    return "function" in task or "torch" in sys.modules


def _end(code: int, number: signal.Signals | None = None) -> NoReturn:
    """End a worker whose task is over, as multiprocessing's children end: threads and exit handlers
    run, but the interpreter is not taken down. With the number of a signal, by that signal.

    PyTorch's native threads sometimes abort a process that takes the interpreter down around them
    ("terminate called without an active exception"), which would make a failure of a job that has
    succeeded.
    """
    if any(thread.is_alive() for thread in stuck_threads):
        for thread in set(threading.enumerate()) - stuck_threads - {threading.current_thread()}:
            if not thread.daemon:
                thread.join()
    else:
        threading._shutdown()  # type: ignore[attr-defined]
    compat.keep_libraries()
    threads: Any = sys.modules.get("allhands.world.native_threads")
    if threads is not None:
        threads.interpreter_ends = False
    atexit._run_exitfuncs()
    _flush()
    if number is not None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(code)


def _beat() -> None:
    beat = encode({"beat": 1})
    while _link is not None:
        time.sleep(BEAT_EVERY)
        try:
            with _link.lock:
                write_all(_link.fd, beat)
        except OSError:
            return


def _describe(error: BaseException) -> dict[str, Any]:
    from allhands.errors import UserError
    from allhands.launch.user_traceback import text_of

    kind = type(error)
    if kind.__module__ in {"builtins", "__main__"}:
        name = kind.__qualname__
    else:
        name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    return {
        "text": f"{name}: {message}" if message else name,
        "traceback": text_of(error),
        "user_error": message if isinstance(error, UserError) else None,
    }


def _users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames of this file, which plain Python would not have."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _main_module(**attributes: Any) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": __builtins__, "__annotations__": {}, **attributes})
    sys.modules["__main__"] = main
    return main


def _set_argv(program: str, args: list[str], original: list[str]) -> None:
    sys.argv = [program, *args]
    sys.orig_argv = [sys.executable, *original]


def _prepend_path(entry: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, entry)


def run_script(script: str, args: list[str]) -> None:
    """Run a Python file, or a folder or zip file with a ``__main__.py``, as Python does."""
    _set_argv(script, args, [script, *args])
    path = os.path.abspath(script)
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        _run_archive(path)
        return
    _prepend_path(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main = _main_module(__file__=path, __cached__=None, __loader__=loader)
    with io.open_code(path) as file:
        source = file.read()
    _note_program(path, source)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _note_program(path: str, source: bytes) -> None:
    global program
    program = path, hashlib.sha256(source).hexdigest()[:16]


def _run_archive(path: str) -> None:
    """A folder or zip file with a `__main__.py`, as `python folder` runs it."""
    sys.path.insert(0, path)
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is None:
        raise SystemExit(f"{sys.executable}: can't find '__main__' module in {path!r}")
    _run_spec(spec)


def _run_module(name: str, args: list[str]) -> None:
    _set_argv("-m", args, ["-m", name, *args])
    _prepend_path(os.getcwd())
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{sys.executable}: No module named {name}")
    sys.argv[0] = spec.origin or name
    _run_spec(spec)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # Only a missing parent package of `name` is our message; a missing import inside it is the
        # user's traceback.
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise


def _run_spec(spec: importlib.machinery.ModuleSpec) -> None:
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    if spec.origin is not None and hasattr(loader, "get_data"):
        _note_program(spec.origin, loader.get_data(spec.origin))
    if code is None:
        raise SystemExit(f"{sys.executable}: No code object available for {spec.name}")
    main = _main_module(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    exec(code, main.__dict__)


def _run_function(task: dict[str, Any]) -> None:
    from allhands.launch import handback, results, ship

    sys.path[:] = task["sys_path"]
    sys.argv = list(task["argv"])
    # The caller's functions and classes arrive by value; its file is not run again, here or in
    # children of this one.
    _main_module()
    handback.arrived = handback.Arrived(task["result"] + handback.SUFFIX)
    _, function, args, kwargs = ship.load(task["function"], handback.arrived.numbered)
    _report({"loaded": True})
    _report({"begun": True})
    result = function(*args, **kwargs)
    returned = results.dump(result, task["result"])
    _report({"returned": returned})
