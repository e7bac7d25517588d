"""A test that hangs fails alone: its stacks are shown, its processes are ended, and the run goes
on.

The methods of pytest-timeout leave the processes of a test. One of them may hold the connection to
xdist open, which then waits for ever. So the hooks here take their place; `tests/conftest.py` has
them.

Python processes that a test has started show their stacks too: PYTHONFAULTHANDLER makes them write
these when they are aborted.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import pytest_timeout

#: In the environment of every process that a test of this process has started, however it has
#: detached itself.
MARK = "ALLHANDS_TEST_PROCESS"
#: Seconds after its timeout at which a test is ended that holds the interpreter's lock, so that
#: nothing here can run.
LAST = 60.0
# Seconds for processes that were aborted to write their stacks, and for what passes these on.
_GRACE = 1.0
_REPORTS = Path(tempfile.gettempdir()) / f"allhands-hanging-{os.getuid()}"


def begin(config: pytest.Config) -> None:
    """To be called by `pytest_configure`."""
    os.environ[MARK] = (
        _name_of(config.workerinput) if hasattr(config, "workerinput") else f"pid-{os.getpid()}"
    )
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")


def _name_of(workerinput: dict[str, Any]) -> str:
    """Of one of xdist's processes, here and on the controller."""
    return f"{workerinput['testrunuid']}-{workerinput['workerid']}"


class _Watch:
    """Watches one test from a thread of its own."""

    def __init__(self, item: pytest.Item, seconds: float) -> None:
        self.item, self.seconds = item, seconds
        self.over = threading.Event()  # the test has ended, in time or not
        self.began = threading.Event()  # the time was over first
        self.text = ""
        self.timer = threading.Timer(seconds, self._fail)
        self.timer.daemon = True
        self._before = signal.signal(signal.SIGALRM, self._interrupt)

    def start(self) -> None:
        self.timer.start()
        faulthandler.dump_traceback_later(self.seconds + LAST, exit=True, file=_report_file())

    def cancel(self) -> None:
        self.over.set()
        self.timer.cancel()
        signal.signal(signal.SIGALRM, self._before)
        faulthandler.cancel_dump_traceback_later()

    def _interrupt(self, *_: object) -> None:
        if not self.over.is_set():
            pytest.fail(f"did not end within {self.seconds:g} s")

    def _fail(self) -> None:
        """Show the stacks, end the processes, and let the test fail."""
        if pytest_timeout.is_debugging() or self.over.is_set():
            return
        self.began.set()
        text = f"{self.item.nodeid} did not end within {self.seconds:g} s\n\n{_own_stacks()}"
        try:
            text += _end_processes(self.item)
        except Exception:
            text += traceback.format_exc()
        self.text = text
        if hasattr(self.item.config, "workerinput"):
            # What is shared among tests has ended with the processes; a new process begins afresh
            # with the next test.
            with _report_file() as file:
                file.write(text.encode("utf-8", "replace"))
            os._exit(1)
        if not self.over.wait(_GRACE):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        if not self.over.wait(10 * _GRACE):
            os.write(2, text.encode("utf-8", "replace"))
            os._exit(1)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Watch a test, in the place of pytest-timeout's own methods."""
    watch = item.watch = _Watch(item, settings.timeout)  # type: ignore[attr-defined]
    item.cancel_timeout = watch.cancel  # type: ignore[attr-defined]
    watch.start()
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that has gone on only because its processes were ended has failed as well."""
    report: Any = yield
    watch: _Watch | None = getattr(item, "watch", None)
    if watch is not None and watch.began.is_set():
        watch.over.set()
        watch.timer.join()
        if watch.text:
            report.outcome, report.longrepr, watch.text = "failed", watch.text, ""
    return report


def pytest_enter_pdb() -> None:
    """A test in a debugger may take its time."""
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """On xdist's controller: end what a process of tests has left."""
    name = _name_of(node.workerinput)
    _kill(lambda: _marked(name))
    if error is None:
        (_REPORTS / name).unlink(missing_ok=True)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """On xdist's controller: show in the report of a test that ended its process what that process
    has written."""
    path = _REPORTS / _name_of(report.node.workerinput)
    if path.is_file():
        report.longrepr = f"{report.longrepr}\n{path.read_text(encoding='utf-8', errors='replace')}"
        path.unlink()


@functools.cache
def _report_file() -> IO[bytes]:
    """What the controller shows when this process has ended in a test."""
    if not os.environ[MARK].startswith("pid-"):
        _REPORTS.mkdir(mode=0o700, exist_ok=True)
        return (_REPORTS / os.environ[MARK]).open("wb")
    return os.fdopen(os.dup(2), "wb")


def _own_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"{names.get(ident, 'a thread')}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    return "\n".join(parts)


def _marked(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == name:
                found.append(process)
    return found


def _started_here() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return list({process.pid: process for process in [*below, *_marked(os.environ[MARK])]}.values())


def _end_processes(item: pytest.Item) -> str:
    """End what this process has started; what was found, and what it has written last."""
    found = _started_here()
    text = "".join(f"\nprocess {process.pid}: {_command(process)}" for process in found)
    pipes = _pipes_from(found)
    # Those without children first, since the others may have to pass on what they write.
    parents = {process.ppid() for process in found if process.is_running()}
    for group in (
        [one for one in found if one.pid not in parents],
        [one for one in found if one.pid in parents],
    ):
        for process in group:
            with contextlib.suppress(psutil.Error, OSError):
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
                process.send_signal(signal.SIGABRT)
        if group:
            time.sleep(_GRACE)
    _kill(_started_here)
    said = [_read(fd) for fd in pipes]
    manager = item.config.pluginmanager.getplugin("capturemanager")
    if manager is not None:
        manager.suspend_global_capture(True)
        said += manager.read_global_capture()
    said += [content for *_, content in item._report_sections]  # taken there when the test went on
    return text + "\n\n" + "\n".join(part for part in said if part)


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:200]
    return "has ended"


def _pipes_from(processes: Iterable[psutil.Process]) -> list[int]:
    """Our reading ends of the pipes that the processes have as standard error."""
    theirs = set()
    for process in processes:
        with contextlib.suppress(OSError):
            theirs.add(os.readlink(f"/proc/{process.pid}/fd/2"))
    ours = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            reads = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if reads and os.readlink(f"/proc/self/fd/{name}") in theirs:
                ours.append(os.dup(int(name)))  # the test may close its own
    return ours


def _read(fd: int) -> str:
    """What a pipe holds, whose writers have ended; closes it."""
    data = b""
    with contextlib.suppress(OSError):
        os.set_blocking(fd, False)
        while piece := os.read(fd, 1 << 16):
            data += piece
    os.close(fd)
    return data.decode("utf-8", "replace")


def _kill(find: Any) -> None:
    """SIGKILL until nothing is left, for five seconds at most."""
    deadline = time.monotonic() + 5
    while (
        processes := [one for one in find() if one.is_running()]
    ) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=0.5)
