"""The package's public names, for modules that lie below what they stand for.

The package itself gives them, which knows all of its parts; a module that would import one from
above asks here where the program runs, and goes without it where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_give: Callable[[str], Any] | None = None


def give_by(function: Callable[[str], Any]) -> None:
    """Have `public` ask this function."""
    global _give
    _give = function


def public(name: str) -> Any:
    """What a public name of the package stands for; ``public("plan")`` is `allhands.plan`."""
    assert _give is not None  # the package was imported before any of its modules
    return _give(name)
