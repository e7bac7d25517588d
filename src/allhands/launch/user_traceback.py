"""Tracebacks of the user's code, without the frames of this package that called it."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

FULL = "ALLHANDS_FULL_TRACEBACK"
_OURS = str(Path(__file__).parents[1]) + os.sep


def text_of(error: BaseException) -> str:
    """The traceback of an error, and of those that led to it, as Python prints it; with
    ALLHANDS_FULL_TRACEBACK=1 all of it.

    An error with no frame of the user's keeps all of its frames. Where a library raised it, the
    line of the user's that called is said first.
    """
    whole = traceback.TracebackException.from_exception(error)
    place = _users_line(whole)
    left_out = 0 if os.environ.get(FULL, "0") not in ("", "0") else _leave_out(whole)
    text = place + "".join(whole.format())
    if left_out:
        return text + f"({left_out} frames of allhands are left out; {FULL}=1 shows them)\n"
    return text


def _leave_out(told: traceback.TracebackException | None) -> int:
    """Take our frames out of an error and those that led to it; returns how many."""
    if told is None:
        return 0
    users = [frame for frame in told.stack if not frame.filename.startswith(_OURS)]
    count = len(told.stack) - len(users) if users else 0
    if users:
        told.stack = traceback.StackSummary.from_list(users)
    for other in (told.__cause__, told.__context__, *(told.exceptions or ())):
        count += _leave_out(other)
    return count


def _users_line(told: traceback.TracebackException) -> str:
    """Where the user's code called the library that raised an error; "" where it raised itself."""
    paths = sysconfig.get_paths()
    found = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    libraries = (_OURS, "<", *(path + os.sep for path in found))
    own = [frame for frame in told.stack if not frame.filename.startswith(libraries)]
    if not own or own[-1] is told.stack[-1]:
        return ""
    frame = own[-1]
    return f"in your code, {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}\n"
