"""A state as a tree: its large tensors by name, and all the rest, which is small and plain."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from allhands.errors import UserError
from allhands.strategies.held import Held

# Tensors of up to so many elements stay with the rest: an optimizer keeps a counter for each
# parameter, and a file entry for each of them would cost more than its content.
SMALL = 64
_MARK = "tensor of the checkpoint"
_PLAIN = (
    torch.Tensor,
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
)


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The large tensors of a state by the path to them (``"model/fc.weight"``), and the state with
    a mark in their places.

    Tensors of which this rank holds a part (`Held`) count as large, since rank 0, which writes the
    rest, may have none of them. The small tensors of the rest are copies; the large ones are not.

    Raises:
        UserError: the state holds an object that could only be stored by executing code on loading.
    """
    tensors: dict[str, Any] = {}
    return tensors, {str(key): _strip(value, str(key), tensors) for key, value in state.items()}


def join(rest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state that `split` took apart. Marks of tensors that are not given (one rank's own) are
    left for a later call."""
    return {key: _fill(value, tensors) for key, value in rest.items()}


def under(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Those whose names begin with a prefix, by what follows it."""
    return {
        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
    }


def _strip(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    if isinstance(value, Held):
        tensors[path] = value
        return (_MARK, path)
    if isinstance(value, torch.Tensor):
        if hasattr(value, "to_local"):
            raise UserError(
                f"{path} is a DTensor, of which each rank has a part; keep its to_local() in "
                "state_dict(), and write loop.register(name, …, each_rank=True)"
            )
        if value.numel() <= SMALL or value.layout != torch.strided or value.is_quantized:
            return value.detach().cpu().clone()
        tensors[path] = value.detach()
        return (_MARK, path)
    if type(value) in (dict, OrderedDict, Counter):
        for key in value:
            _check_plain(key, f"{path} key")
        stripped = {key: _strip(item, f"{path}/{key}", tensors) for key, item in value.items()}
        return type(value)(stripped) if type(value) is not dict else stripped
    if type(value) in (list, tuple):
        return type(value)(
            _strip(item, f"{path}/{number}", tensors) for number, item in enumerate(value)
        )
    if isinstance(value, (set, frozenset)):
        for item in value:
            _check_plain(item, f"{path} member")
        return set(value)
    _check_plain(value, path)
    return value


def path_in(value: Any) -> str | None:
    """The path that a mark names; None when the value is no mark."""
    return value[1] if type(value) is tuple and len(value) == 2 and value[0] == _MARK else None


def _fill(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    path = path_in(value)
    if path is not None:
        return tensors.get(path, value)
    if type(value) in (dict, OrderedDict, Counter):
        filled = {key: _fill(item, tensors) for key, item in value.items()}
        return type(value)(filled) if type(value) is not dict else filled
    if type(value) in (list, tuple):
        return type(value)(_fill(item, tensors) for item in value)
    return value


def _check_plain(value: Any, where: str) -> None:
    """Refuse what torch.load(weights_only=True) would not read back, before anything is written."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        for number, item in enumerate(value):
            _check_plain(item, f"{where}/{number}")
    elif isinstance(value, (np.generic, np.ndarray)) or not isinstance(value, _PLAIN):
        raise UserError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
            "cannot store safely; keep "
            "only tensors, numbers, strings, lists and dicts in state_dict()"
        )
