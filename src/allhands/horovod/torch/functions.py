"""Making all ranks start from rank 0's state, and objects of any sort."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from allhands.errors import UserError, kind_of
from allhands.horovod import engine
from allhands.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Overwrite tensors with rank `root_rank`'s, all in one message a sort of device.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or any dict or iterable of
            (name, tensor), or of tensors. Values of a dict that are no tensors are left alone.
        root_rank: whose.

    Raises:
        UserError: it is none of these.
        HorovodInternalError: names, shapes or dtypes differ between ranks.
    """
    named: list[tuple[str, torch.Tensor]] = []
    if isinstance(params, Mapping):
        named = [
            (str(name), value)
            for name, value in sorted(params.items())
            if isinstance(value, torch.Tensor)
        ]
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        for place, entry in enumerate(params):
            if isinstance(entry, tuple) and len(entry) == 2:
                pair = entry
            else:
                pair = (f"parameter {place}", entry)
            if not isinstance(pair[1], torch.Tensor):
                raise UserError(
                    f"broadcast_parameters: {pair[0]!r} is {kind_of(pair[1])}; give tensors, or "
                    "(name, tensor)"
                )
            named.append((str(pair[0]), pair[1]))
    else:
        raise UserError(
            f"broadcast_parameters: params is {kind_of(params)}; give model.state_dict() or "
            "model.named_parameters()"
        )
    running = engine.current()
    handles = []
    for device in sorted({tensor.device.type for _, tensor in named}):
        there = [(name, tensor) for name, tensor in named if tensor.device.type == device]
        values = [tensor.detach() for _, tensor in there]
        whole = [value.contiguous() for value in values]
        names = [name for name, _ in there]
        handles.append(
            (running.broadcast(whole, root_rank, outputs=whole, tensor_names=names), values, whole)
        )
    for handle, values, whole in handles:
        handle.wait()
        for value, own in zip(values, whole, strict=True):
            if own is not value:
                value.copy_(own)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None
) -> None:
    """Give all ranks rank `root_rank`'s state and options of an optimizer. No step is made for it,
    whatever the state.

    Args:
        optimizer: with the same parameters on all ranks.
        root_rank: whose.
        model: as in Horovod; not needed.

    Raises:
        UserError: it is an LBFGS, whose steps depend on each rank's own loss; or its state holds
            something other than plain values and tensors.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            "broadcast_optimizer_state: LBFGS chooses its steps by each rank's own loss; set "
            "optimizer to another one"
        )
    running = engine.current()
    own = optimizer.state_dict() if running.world.rank == root_rank else None
    state = running.broadcast_object(own, root_rank)
    if running.world.rank != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rank `root_rank`'s object, on all ranks.

    Nothing is unpickled that could run: it may hold plain values, containers, tensors (which arrive
    on the CPU) and numpy arrays.

    Raises:
        UserError: on all ranks, when it holds something else.
    """
    return engine.current().broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in the order of the ranks; see `broadcast_object`."""
    return engine.current().allgather_object(obj, name, process_set)
