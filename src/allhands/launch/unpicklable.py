"""Finds the part of an object that cannot be pickled, so that the error can name it."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from allhands.errors import UserError
from allhands.launch.optimizer_state import whole_state
from allhands.launch.ship import can_pickle

_DEEPEST = 30
_HARMLESS = (type(None), bool, int, float, complex, str, bytes)


def name_arguments(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    named: dict[str, Any] = {f"args[{index}]": value for index, value in enumerate(args)}
    try:
        names = [
            p.name
            for p in inspect.signature(fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    for index, name in enumerate(names[: len(args)]):
        named[name] = named.pop(f"args[{index}]")
    return {**named, **kwargs}


def explain(error: Exception, roots: Mapping[str, Any]) -> UserError:
    """The message for an object that could not be pickled.

    Args:
        error: what pickling all of it raised.
        roots: the objects that it consists of, by the names that the user knows.
    """
    for name, value in roots.items():
        if (cause := can_pickle(value)) is not None:
            path, culprit, cause = _descend(name, value, cause)
            kind = type(culprit)
            what = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
            inside = f" (in argument `{name}`)" if name not in (path, "fn") else ""
            return UserError(
                f"`{path}`{inside} is a {what}, which cannot be sent to the workers: {cause}. "
                "Create it "
                "inside the function that the workers run, build the data there with "
                'datasets={"get_datasets_fn": ...}, '
                "or leave it out in its owner's __getstate__()"
            )
    return UserError(f"the arguments cannot be sent to the workers together: {error}")


def _descend(path: str, value: Any, cause: Exception) -> tuple[str, Any, Exception]:
    """Follow the parts that fail until one fails although all its parts can be pickled."""
    seen: set[int] = set()
    for _ in range(_DEEPEST):
        seen.add(id(value))
        for child_path, child in _parts(path, value):
            if type(child) in _HARMLESS or id(child) in seen:
                continue
            if (why := can_pickle(child)) is not None:
                path, value, cause = child_path, child, why
                break
        else:
            break
    return path, value, cause


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{path}[{key!r}]", item
            yield f"a key of {path}", key
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(path, value)
    elif isinstance(value, type):
        for name, item in vars(value).items():
            if not name.startswith("__") or name == "__init__":
                yield f"{path}.{name}", item
    else:
        yield from _parts_of_object(path, value)


def _parts_of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"{name} (used by {path})", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for index, item in enumerate(function.__defaults__ or ()):
        yield f"default {index} of {path}", item
    for name in global_names(function.__code__):
        if name in function.__globals__:
            yield f"{name} (used by {path})", function.__globals__[name]


def global_names(code: types.CodeType) -> Iterator[str]:
    """The names that a function's code, or a function within it, may look up outside; attributes'
    names are among them."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


def _parts_of_object(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    torch = sys.modules.get("torch")
    state = vars(value) if hasattr(value, "__dict__") else {}
    if (whole := whole_state(value)) is not None:
        state = whole
    elif "__getstate__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}:
        try:
            own = value.__getstate__()
            state = own if isinstance(own, dict) else state
        except Exception:
            return
    module = torch is not None and isinstance(value, torch.nn.Module)
    for name, item in state.items():
        if module and name in ("_parameters", "_buffers", "_modules"):
            for inner, part in item.items():
                yield f"{path}.{inner}", part
        else:
            yield f"{path}.{name}", item
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if isinstance(name, str) and hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)
    if type(value).__module__ == "__main__":
        yield f"class {type(value).__name__}", type(value)
