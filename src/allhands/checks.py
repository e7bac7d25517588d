"""Checks of settings, each with one message: what was written, and what it must be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

from allhands.errors import UserError


def is_whole(value: Any, at_least: int = 1) -> TypeGuard[int]:
    """Whether it is a whole number of at least `at_least`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is an int or a float; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_whole(
    name: str, value: Any, at_least: int = 1, *, of: str = "", unit: str = "", otherwise: str = ""
) -> None:
    """Raise `UserError` unless `value` is a whole number of at least `at_least`.

    Args:
        name: of the setting.
        value: what was given for it.
        at_least: the smallest that is right.
        of: the class or function that takes the setting.
        unit: what is counted.
        otherwise: where None is right too, what it means: "None", or "None for all".
    """
    if is_whole(value, at_least) or (value is None and otherwise):
        return
    bound = f" of {unit}, at least {at_least}" if unit else f" of at least {at_least}"
    more = f", or {otherwise}" if otherwise else ""
    raise UserError(f"{_written(name, value, of)}; it must be a whole number{bound}{more}")


def check_flag(name: str, value: Any, of: str = "") -> None:
    """Raise `UserError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{_written(name, value, of)}; it must be True or False")


def check_choice(
    name: str, value: Any, known: Iterable[Any], of: str = "", otherwise: str = ""
) -> None:
    """Raise `UserError` unless `value` is one of `known`, or None where `otherwise` says "None"."""
    names = list(known)
    if value in names or (value is None and otherwise):
        return
    listed = ", ".join(map(repr, names)) + (f", or {otherwise}" if otherwise else "")
    raise UserError(f"{_written(name, value, of)}; it must be one of {listed}")


# Of the packages that wrap a training's objects for loops of their own: the name, and what wraps.
_WRAPPERS = {
    "accelerate": ("Accelerate", "accelerator.prepare"),
    "lightning": ("Lightning Fabric", "fabric.setup"),
    "lightning_fabric": ("Lightning Fabric", "fabric.setup"),
}


def check_bare(what: str, value: Any) -> None:
    """Raise `UserError` for an object that another package has wrapped for its own loop.

    The wrapper would move, share out or synchronise a second time what allhands already does.
    """
    package = type(value).__module__.partition(".")[0]
    if package in _WRAPPERS:
        name, call = _WRAPPERS[package]
        raise UserError(
            f"{what} is {name}'s {type(value).__name__}; pass what {call}() was given, and leave "
            "that call out: allhands places models and shares out the data itself"
        )


def _written(name: str, value: Any, of: str) -> str:
    return f"{of}({name}={value!r})" if of else f"{name}={value!r}"
