"""The errors that allhands raises on purpose.

Each message says what was given, what it must be, and what to write instead. Errors that the user can mend by changing
what they wrote are `UserError`; the command line prints them without a traceback.
"""

from __future__ import annotations

from typing import Any


class AllhandsError(Exception):
    """Base of every error that allhands raises on purpose."""


class UserError(AllhandsError, ValueError):
    """Something that was passed, set or stored cannot be honoured; the message names the replacement."""


class WorldError(AllhandsError, RuntimeError):
    """The processes could not find each other, or their settings contradict one another."""


class HostError(AllhandsError, RuntimeError):
    """A host of the job cannot be used; the message names it and says why. `host` is its name."""

    def __init__(self, host: str, message: str) -> None:
        super().__init__(f"host {host}: {message}")
        self.host = host


class WorkerError(AllhandsError, RuntimeError):
    """A worker failed. `exit_code` is what the launcher exits with, `rank` the first rank that failed."""

    def __init__(self, message: str, rank: int | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


def kind_of(value: Any) -> str:
    """What a value is, for a message: ``a Linear``, or ``None``."""
    return "None" if value is None else f"a {type(value).__name__}"
