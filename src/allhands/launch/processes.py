"""What the operating system knows about processes: states, children, groups, exit causes.

Linux has more to offer than POSIX (`/proc`, subreapers, the parent-death signal); elsewhere those
functions do nothing and the rest of the launcher still works, with weaker guarantees against
processes that detach themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

# What asks a training to save and leave.
REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can slip away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Ask for SIGKILL when the parent process ends. Ends at once if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """REQUESTS wait until the context is left; in a process that is started in it, until that calls
    `take_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_signals() -> None:
    """Let the signals through that were held when this process was started; its handlers are in
    place now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def set_handlers(
    numbers: Iterable[int], handler: Callable[..., Any], *, of_users: bool = True
) -> dict[int, Any]:
    """Set the handler of signals; ignored ones (nohup) stay ignored, and with `of_users` False
    those that somebody handles are left to that.

    Returns:
        The handlers that stood before, for `restore_handlers`.
    """
    standing = {number: signal.getsignal(number) for number in numbers}
    return {
        number: signal.signal(number, handler)
        for number, before in standing.items()
        if (before is not signal.SIG_IGN if of_users else before is signal.SIG_DFL)
    }


def restore_handlers(before: Mapping[Any, Any]) -> None:
    """Put the handlers back that stood before."""
    for number, handler in before.items():
        signal.signal(number, handler)


def gpus() -> int:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves on this host, asked without torch: an agent must
    not touch them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    try:
        # Asking the driver's tool takes less than importing torch.
        answer: Any = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    if answer.returncode == 0:
        return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    return 0


def _stat(pid: int) -> list[str] | None:
    """State, parent, group, session, … of a process, from `/proc/PID/stat` after the command
    name."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def state(pid: int) -> str:
    """One letter: R running, S sleeping, D in the kernel, T stopped, t traced, Z ended; empty when
    it is not known."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def is_ending(pid: int) -> bool:
    """Whether a process is on its way out already, so that a signal sent now is not what ends it.

    The kernel sets the mark before it closes the process's connections: when a peer can have
    noticed, it stands.
    """
    fields = _stat(pid)
    return fields is not None and bool(int(fields[6]) & _PF_EXITING)


def children(pid: int) -> list[int]:
    """Direct children of a process. Empty where there is no `/proc`."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    found = []
    for name in names:
        if name.isdecimal():
            fields = _stat(int(name))
            if fields and int(fields[1]) == pid:
                found.append(int(name))
    return found


def ended_children() -> Iterator[tuple[int, int]]:
    """Number and exit status of each child that has ended, which is forgotten with it."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def signal_group(group: int, number: int) -> bool:
    """Signal every process of a group; False when none is left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def exit_of(status: int) -> dict[str, Any]:
    """A wait status as `{"code": n}` or `{"signal": n}`."""
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    return {"code": os.WEXITSTATUS(status)}


def signal_name(number: int) -> str:
    """`SIGKILL` for 9, `signal 70` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
