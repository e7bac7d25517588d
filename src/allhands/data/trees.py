"""Batches and outputs as trees of tensors: dicts, lists, tuples and dataclasses, and objects of
libraries in them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def _unchanged(value: Any) -> Any:
    return value


def map_tensors(
    value: Any, change: Callable[[torch.Tensor], Any], otherwise: Callable[[Any], Any] = _unchanged
) -> Any:
    """A tree with each of its tensors changed, in containers of the same classes.

    Args:
        value: tensors, or dicts and other mappings, lists, tuples and dataclasses of them.
        change: gives what takes a tensor's place.
        otherwise: gives what takes the place of any other leaf; what it is itself, if left out.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        made = {key: map_tensors(item, change, otherwise) for key, item in value.items()}
        return made if type(value) is dict else _like(value, made)
    if isinstance(value, (list, tuple)):
        items = (map_tensors(item, change, otherwise) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_dataclass(value):
        fields = {name: getattr(value, name) for name in _fields(value)}
        return _like(
            value, {name: map_tensors(item, change, otherwise) for name, item in fields.items()}
        )
    return otherwise(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a tree, in order."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


def to_device(value: Any, device: torch.device) -> Any:
    """A batch with all its tensors on `device`; an object in it is moved by its own ``to``, as
    batches of PyTorch Geometric are."""

    def move(other: Any) -> Any:
        to = getattr(other, "to", None)
        return to(device) if callable(to) else other

    return map_tensors(
        value, lambda t: t if t.device == device else t.to(device, non_blocking=True), move
    )


def named_members(value: Any) -> Mapping[str, Any] | None:
    """What a batch or an output holds by name: the items of a mapping, the fields of a dataclass,
    the keys of an object of PyTorch Geometric, the attributes of another object. None for tensors,
    lists, tuples and what has no names."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._asdict()  # type: ignore[attr-defined]
    if value is None or isinstance(value, (torch.Tensor, list, tuple, str, bytes)):
        return None
    if _is_dataclass(value):
        return {name: getattr(value, name) for name in _fields(value)}
    keys = getattr(value, "keys", None)
    if callable(keys) and hasattr(value, "__getitem__"):
        return {key: value[key] for key in keys()}
    return vars(value) if hasattr(value, "__dict__") else None


def is_samples(value: Any, kinds: tuple[type, ...] = (list,)) -> bool:
    """Whether it is a list with a dict for each sample, as models and targets of detection are."""
    members: Any = value if isinstance(value, kinds) else ()
    return bool(members) and all(isinstance(member, Mapping) for member in members)


def rows_in(value: Any, in_lists: bool = True) -> int | None:
    """The samples that a batch or an output holds; None where that is not known.

    The graphs of a batch of PyTorch Geometric, the members of a list of dicts, else the first
    dimension of the first tensor: those that are members themselves come before those further
    inside, which must agree.

    Args:
        value: what holds samples.
        in_lists: whether tensors in a list inside it count; they may be one a sample.
    """
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    graphs = getattr(value, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs
    if is_samples(value):
        return len(value)
    if isinstance(value, (list, tuple)):
        members = list(value)
    elif isinstance(value, Mapping) or _is_dataclass(value):
        members = list((named_members(value) or {}).values())
    else:
        return None
    for member in members:
        if isinstance(member, torch.Tensor) and member.dim():
            return len(member)
    for member in members:
        if is_samples(member, (list, tuple)):
            return len(member)
    if not in_lists:
        members = [member for member in members if not isinstance(member, (list, tuple))]
    found = {rows for rows in (rows_in(member, in_lists) for member in members) if rows is not None}
    return found.pop() if len(found) == 1 else None


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value)]


def _like(value: Any, items: dict[str, Any]) -> Any:
    """A copy of a dataclass or of a mapping of another class (the outputs of transformers are both)
    with other items; a dict for a mapping that takes none."""
    if isinstance(value, Mapping) and not hasattr(value, "__setitem__"):
        return items
    made: Any = copy.copy(value)
    for name, item in items.items():
        if isinstance(value, Mapping):
            made[name] = item
        if _is_dataclass(value):
            object.__setattr__(made, name, item)
    return made
