"""The errors that allhands raises on purpose.

Each message says what was given, what it must be, and what to write instead. Errors that the user
can mend by changing what they wrote are `UserError`; the command line prints them without a
traceback.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn


class AllhandsError(Exception):
    """Base of every error that allhands raises on purpose."""


class UserError(AllhandsError, ValueError):
    """Something that was passed, set or stored cannot be honoured; the message names the
    replacement."""


class WorldError(AllhandsError, RuntimeError):
    """The processes could not find each other, or their settings contradict one another."""


class HostError(AllhandsError, RuntimeError):
    """A host of the job cannot be used; the message names it and says why. `host` is its name."""

    def __init__(self, host: str, message: str) -> None:
        super().__init__(f"host {host}: {message}")
        self.host = host


class WorkerError(AllhandsError, RuntimeError):
    """A worker failed. `exit_code` is what the launcher exits with, `rank` the first rank that
    failed."""

    def __init__(self, message: str, rank: int | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


def kind_of(value: Any) -> str:
    """What a value is, for a message: ``a Linear``, or ``None``."""
    return "None" if value is None else f"a {type(value).__name__}"


def nearest(word: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name in `known` that is most like `word`, in any capitals; None where none is.

    Args:
        word: what was written.
        known: what could have been meant.
        cutoff: how like they must be, from 0 to 1 (the same).
    """
    import difflib

    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(str(word).lower(), list(names), n=1, cutoff=cutoff)
    return names[found[0]] if found else None


def did_you_mean(word: object, known: Iterable[str], otherwise: str = ".") -> str:
    """``; did you mean 'x'?``, to follow a name that does not exist; `otherwise` where no name is
    like it."""
    near = nearest(word, known)
    return otherwise if near is None else f"; did you mean {near!r}?"


def warn_renamed(old: str, new: str) -> None:
    """Warn that a spelling will go, and say what to write instead."""
    warnings.warn(
        f"{old} is an old spelling, which the next release will not have; write {new}",
        FutureWarning,
        stacklevel=3,
    )


def refuse_name(module: str, name: str, instead: Mapping[str, str]) -> NoReturn:
    """Say that a module of ours has no such name.

    Args:
        module: its full name.
        name: that was asked for.
        instead: what to write, for names that another library has.

    Raises:
        UserError: `instead` knows the name.
        AttributeError: it does not.
    """
    if name in instead:  # an AttributeError would not be told by `from … import`
        raise UserError(f"{module.rpartition('.')[2]}.{name} is not here; write {instead[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
