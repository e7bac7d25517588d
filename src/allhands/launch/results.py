"""How the results of workers travel back to the process that started them: as data, never as a
pickle to execute."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from typing import Any

from allhands.errors import UserError
from allhands.report.history import History

_PLAIN = (type(None), bool, int, float, str)
_ALLOWED = (
    "None, bools, numbers, strings, bytes, tensors, numpy arrays, and lists, tuples, dicts "
    "and sets of these"
)


def _fits_json(value: Any) -> bool:
    kind = type(value)
    if kind is list:
        return all(_fits_json(item) for item in value)
    if kind is dict:
        return all(type(key) is str and _fits_json(item) for key, item in value.items())
    return kind in _PLAIN


def _check(value: Any, path: str, seen: set[int], what: str) -> None:
    """Raise for the first part of a result that is not data; `path` says where it is."""
    import numpy
    import torch

    kind = type(value)
    if kind in (
        *_PLAIN,
        complex,
        bytes,
        bytearray,
        torch.Tensor,
        torch.nn.Parameter,
        torch.Size,
        torch.dtype,
    ):
        return
    if isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if kind in (list, tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", seen, what)
    elif kind is set:
        for item in value:
            _check(item, f"an element of {path}", seen, what)
    elif kind in (dict, OrderedDict, Counter, History):
        for key, item in value.items():
            _check(key, f"the key {key!r} of {path}", seen, what)
            _check(item, f"{path}[{key!r}]", seen, what)
    else:
        hint = "; return its state_dict() instead" if isinstance(value, torch.nn.Module) else ""
        raise UserError(
            f"{what} something that is not data: {path} is a "
            f"{kind.__module__}.{kind.__qualname__}{hint}. A worker may return {_ALLOWED}"
        )


def dump(value: Any, path: str) -> dict[str, Any]:
    """Make a result ready to be sent.

    Returns:
        A message for `load`: small plain values within it, everything else in the file at `path`.

    Raises:
        UserError: the value holds something that is not data.
    """
    if _fits_json(value):
        return {"value": value}
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        save(value, file)
    return {"file": path}


def save(value: Any, file: Any, what: str = "the function returned") -> None:
    """Write a value to a file, for `read`.

    Raises:
        UserError: it holds something that is not data; `what` begins the message.
    """
    import torch

    _check(value, "result", set(), what)
    torch.save(value, file)


def load(message: dict[str, Any]) -> Any:
    """The value that `dump` was given; tensors of a GPU arrive on the CPU."""
    if "value" in message:
        return message["value"]
    return read(message["file"])


def read(file: Any) -> Any:
    """The value that `save` wrote to a file or path; tensors of a GPU arrive on the CPU."""
    import numpy
    import torch

    kinds = [getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__ if name != "ObjectDType"]
    builders = [numpy.zeros(0).__reduce__()[0], numpy.float64(0).__reduce__()[0]]
    data: list[Any] = [History, numpy.ndarray, numpy.dtype, *builders, *kinds]
    # Its end forgets all of them, also those that the user has registered.
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([one for one in data if one not in known]):
        return torch.load(file, map_location="cpu", weights_only=True)
