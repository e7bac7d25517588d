"""What callbacks keep of a model that lies in parts on the ranks: whole in checkpoints, in parts
again afterwards.

A dict with the names of the model's parameters as keys, as ``state_dict()`` gives them, is
recognized wherever it is in a callback's state: each value is taken for a part like that of the
parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from allhands.comm import all_gather_text
from allhands.strategies.held import Held, nowhere
from allhands.world import World

Parts = Mapping[str, Held]


def in_parts(state: Any, parts: Parts, world: World) -> Any:
    """A state in which what lies like a part of the model is `Held`; all ranks call it together.

    Args:
        state: of dicts, lists and values.
        parts: what this rank holds of each tensor of the plain model, by name.
        world: the ranks.
    """
    found: dict[str, dict[str, Any]] = {}

    def hold(path: str, own: dict[Any, Any]) -> dict[Any, Any]:
        like = {name: _part(value, parts[name]) for name, value in own.items() if name in parts}
        held = {name: value for name, value in like.items() if value is not None}
        if held:
            found[path] = {
                name: [list(value.shape), str(value.dtype).removeprefix("torch.")]
                for name, value in held.items()
            }
        return own | held

    state = _walk(state, "", hold)
    everywhere: dict[str, dict[str, Any]] = {}
    for text in all_gather_text(json.dumps(found), world):
        for path, names in json.loads(text).items():
            everywhere.setdefault(path, {}).update(names)

    def complete(path: str, own: dict[Any, Any]) -> dict[Any, Any]:
        others = {name: kind for name, kind in everywhere.get(path, {}).items() if name not in own}
        return own | {
            name: nowhere(shape, getattr(torch, dtype)) for name, (shape, dtype) in others.items()
        }

    return _walk(state, "", complete)


def has_parts(state: Any, parts: Parts) -> bool:
    """Whether something in a state lies like a part of the model."""
    found = False

    def look(path: str, own: dict[Any, Any]) -> dict[Any, Any]:
        nonlocal found
        like = (_part(own[name], parts[name]) for name in own if name in parts)
        found = found or any(one is not None for one in like)
        return own

    _walk(state, "", look)
    return found


def of_this_rank(state: Any, parts: Parts, model: nn.Module) -> Any:
    """The reverse, out of a state with whole tensors: this rank's parts, as `model` has them
    now."""
    own = model.state_dict()

    def take(path: str, given: dict[Any, Any]) -> dict[Any, Any]:
        named = [
            name for name, value in given.items() if name in parts and _is_whole(value, parts[name])
        ]
        taken = {name: value for name, value in given.items() if name not in named}
        return taken | {
            name: _like(own[name], given[name], parts[name]) for name in named if name in own
        }

    return _walk(state, "", take)


def _part(value: Any, held: Held) -> Held | None:
    """A value that lies like a part of the plain model's tensor; None where it does not."""
    local = getattr(value, "_local_tensor", value)
    if not isinstance(local, torch.Tensor) or held.local is None or local.shape != held.local.shape:
        return None
    return held.with_local(local)


def _is_whole(value: Any, held: Held) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == held.shape


def _like(present: torch.Tensor, whole: torch.Tensor, held: Held) -> torch.Tensor:
    assert held.local is not None
    local = torch.empty(held.local.shape, dtype=whole.dtype, device=held.local.device)
    held.take(whole, local)
    if not hasattr(present, "placements"):
        return local
    from torch.distributed.tensor import DTensor

    sharded: Any = present
    return DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=present.shape,
        stride=present.stride(),
    )


def _walk(value: Any, path: str, change: Callable[[str, dict[Any, Any]], dict[Any, Any]]) -> Any:
    """A state in which each dict was changed, inner ones first."""
    if isinstance(value, dict):
        return change(
            path, {key: _walk(item, f"{path}/{key}", change) for key, item in value.items()}
        )
    if isinstance(value, (list, tuple)):
        return type(value)(list(_number(value, path, change)))
    return value


def _number(values: Any, path: str, change: Any) -> Iterator[Any]:
    for number, item in enumerate(values):
        yield _walk(item, f"{path}/{number}", change)
