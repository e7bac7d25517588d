"""The calls that this rank makes together with the others, in order; `allhands.comm.calls` compares
them between ranks."""

from __future__ import annotations

import os
import sysconfig
from types import FrameType
from typing import Any

Label = str | tuple[Any, ...]

# How far one rank may be ahead of another one and still be compared with it. On a GPU the hosts run
# ahead of the collectives.
KEPT = 256
_LONGEST = 200  # characters of a label or position that are published

ring: list[Label] = [""] * KEPT
made = 0
place: Label = ""


def note(label: Label) -> None:
    """Log that this rank is about to make a call which all ranks make together.

    Cheap enough to stand in front of every optimizer step. The calls of one process are to be noted
    by one thread.

    Args:
        label: what the call is, the same on all ranks: a string, or a tuple of strings and numbers,
            such as ``("step", 17)``, which is put together ("step 17") only when somebody has to
            read it.
    """
    global made
    # Measured on one core of an AMD EPYC with Python 3.11: 73 ns with a string, 95 ns with a tuple
    # made for it.
    ring[made % KEPT] = label
    made += 1  # last: the watcher, in another thread, reads the count first


def position(text: Label) -> None:
    """Say where this rank is between its calls ("in Saver.on_epoch_end"); ``""`` when that is over.

    Only messages show it. Ranks may differ in it. A tuple is put together only when it is read.
    """
    global place
    place = text


def text_of(label: Label) -> str:
    """The label as messages show it."""
    text = label if isinstance(label, str) else " ".join(map(str, label))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _not_the_users() -> tuple[str, ...]:
    """Folders of code that is not the user's: this package, Python's library, installed
    packages."""
    paths = sysconfig.get_paths()
    folders = {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
    folders |= {
        os.path.abspath(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    return tuple(folder + os.sep for folder in folders)


_NOT_THE_USERS = _not_the_users()
_PACKAGES = f"{os.sep}site-packages{os.sep}"  # of another environment that this one builds on


def users_line(frame: FrameType | None) -> str:
    """``file:line in function`` of the innermost frame of the user's code, else of any code; ""
    without a frame."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_NOT_THE_USERS, "<frozen")) and _PACKAGES not in file:
            break
        frame = frame.f_back
    found = frame or innermost
    if found is not None:
        return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}"
    return ""
