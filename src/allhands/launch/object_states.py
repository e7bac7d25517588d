"""What can change about an object, by the way in which it is put back into another one."""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from allhands.launch.optimizer_state import whole_state
from allhands.launch.unpicklable import global_names

NUMBERS = (type(None), bool, int, float, complex, str, bytes)


_CONTAINERS = (dict, list, set, bytearray, collections.deque)


# What a module is made of whose class pickles in a way of its own.
_PARTS_OF_MODULE = ("_parameters", "_buffers", "_modules", "training")


@dataclass
class ObjectParts:
    """What one object has: `parts` by key. `whole`: it has no others."""

    kind: str
    parts: list[tuple[Any, Any]]
    about: Any = None
    whole: bool = True


def states_of(value: Any, by_value: bool) -> Iterator[ObjectParts]:
    """What can change about one object, by the way in which it is put back."""
    torch = sys.modules["torch"]
    if isinstance(value, type):
        if by_value:
            yield ObjectParts(
                "class",
                [(name, item) for name, item in vars(value).items() if _is_data(name, item)],
            )
    elif isinstance(value, types.FunctionType):
        if by_value:
            names = dict.fromkeys(
                name for name in global_names(value.__code__) if name in value.__globals__
            )
            yield ObjectParts("names", [(name, value.__globals__[name]) for name in names])
            yield ObjectParts("closure", list(_closure(value).items()))
            yield ObjectParts("attributes", list(vars(value).items()))
    elif isinstance(value, torch.Tensor):
        if not value.is_meta:
            yield ObjectParts("tensor", [("values", value.detach())], value.requires_grad)
    elif isinstance(value, sys.modules["numpy"].ndarray if "numpy" in sys.modules else ()):
        yield ObjectParts("array", [("values", value.view())])
    elif not isinstance(value, types.ModuleType):
        yield from _states_of_instance(value, torch)


def _states_of_instance(value: Any, torch: Any) -> Iterator[ObjectParts]:
    kind: Any = type(value)
    plain: Any = object
    if isinstance(value, dict):
        yield ObjectParts("dict", list(value.items()))
    elif isinstance(value, (list, collections.deque, bytearray)):
        yield ObjectParts("list", [("items", list(value))])
    elif isinstance(value, set):
        yield ObjectParts("set", [("items", list(value))])
    own_reduce = (
        kind.__reduce_ex__ is not plain.__reduce_ex__ or kind.__reduce__ is not plain.__reduce__
    )
    if isinstance(value, torch.nn.Module) and own_reduce:
        yield ObjectParts(
            "attributes",
            [(name, vars(value)[name]) for name in _PARTS_OF_MODULE],
            kind,
            whole=False,
        )
    elif (whole := whole_state(value)) is not None:
        # The caller's own schedule wraps its `step`.
        whole.pop("step", None)
        yield ObjectParts("attributes", list(whole.items()), kind, whole=False)
    elif own_reduce and not isinstance(value, dict):
        return
    elif kind.__getstate__ is not plain.__getstate__:
        try:
            state = value.__getstate__()
        except Exception:  # as that of parametrized modules
            state = dict(getattr(value, "__dict__", {}))
        if isinstance(state, dict):
            yield ObjectParts("attributes", list(state.items()), kind, whole=False)
    else:
        slots: dict[str, Any] = {}
        state = plain.__getstate__(value)
        if isinstance(state, tuple):
            state, slots = state
        if state or (hasattr(value, "__dict__") and not isinstance(value, _CONTAINERS)):
            yield ObjectParts("attributes", list((state or {}).items()), kind)
        if slots:
            yield ObjectParts("slots", list(slots.items()), kind, whole=False)


MISSING = object()


def _closure(function: types.FunctionType) -> dict[str, Any]:
    """What a function uses of the function around it, by name; without names that have no value."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: value for name, cell in cells if (value := content_of(cell)) is not MISSING}


def content_of(cell: types.CellType) -> Any:
    """What a cell of a closure holds; `MISSING` where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def belongings(value: Any, by_value: bool) -> Iterator[Any]:
    """Other objects that belong to a function or a class, and whose state may have changed by
    it."""
    if isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType) and by_value:
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, type) and by_value:
        yield from value.__mro__[1:]
        for item in vars(value).values():
            if isinstance(item, property):
                yield from (item.fget, item.fset)
            yield item.__func__ if isinstance(item, (staticmethod, classmethod)) else item
    elif not isinstance(value, (type, types.FunctionType, types.ModuleType)):
        yield type(value)


def _is_data(name: str, item: Any) -> bool:
    return not (
        name.startswith("__")
        or name.startswith("_abc_")
        or isinstance(item, type)
        or hasattr(item, "__get__")
    )


def hashable(key: Any) -> Any:
    """What stands for a key in a set."""
    return key if isinstance(key, NUMBERS) else id(key)


def type_name(item: Any) -> str:
    """The name of a value's type, with its module."""
    kind = type(item)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.").removeprefix(
        "__main__."
    )
