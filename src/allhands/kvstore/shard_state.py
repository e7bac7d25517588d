"""All that a server holds, as tensors with names: for workers that save, for snapshots, and
back."""

from __future__ import annotations

from typing import Any

import torch

from allhands.errors import UserError

# Names: kind, number of the chunk or table, name of the state; none of them holds a tab.
_WEIGHTS, _SENT, _RESIDUAL = "weights", "sent", "residual"
ANEW = "anew"  # the chunk's optimizer is to have its first state


def state_of_chunk(chunk: Any, with_weights: bool) -> dict[str, torch.Tensor]:
    """Copies of one chunk's states, as in `state_of`."""
    prefix = f"chunk\t{chunk.number}\t"
    found: dict[str, torch.Tensor] = {}
    with chunk.lock:
        if chunk.optimizer is not None:
            tensors, numbers = chunk.optimizer.state()
            found |= {prefix + name: value.detach().clone() for name, value in tensors.items()}
            found |= {
                prefix + name: torch.tensor(value, dtype=torch.float64)
                for name, value in numbers.items()
            }
        if with_weights:
            found[prefix + _WEIGHTS] = chunk.weights.clone()
    return found


def state_of_table(table: Any) -> dict[str, torch.Tensor]:
    """Copies of one table's rows and states, as in `state_of`."""
    with table.lock:
        state = table.rows.state()
        return {
            f"table\t{table.number}\t{name}": value.detach().clone().contiguous()
            for name, value in state.items()
        }


def whole_of(chunk: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """All of a chunk between two rounds: what is no tensor, and copies of the tensors, as in
    `state_of`."""
    with chunk.lock:
        fields = {
            "chunk": chunk.number,
            "version": chunk.version,
            "ready": chunk.ready,
            "square": chunk.square,
            "workers": chunk.workers,
            "options": None if chunk.optimizer is None else chunk.optimizer.options(),
        }
        tensors = state_of_chunk(chunk, True)
        if chunk.down is not None:
            tensors[f"chunk\t{chunk.number}\t{_SENT}"] = chunk.sent.clone()
            tensors[f"chunk\t{chunk.number}\t{_RESIDUAL}"] = chunk.down.state().clone()
        return fields, tensors


def load_whole(chunk: Any, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Continue from what `whole_of` gave; tensors of other chunks are left."""
    prefix = f"chunk\t{chunk.number}\t"
    own = {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
    with chunk.lock:
        sent, residual = own.pop(_SENT, None), own.pop(_RESIDUAL, None)
        chunk.weights.copy_(own.pop(_WEIGHTS))
        if chunk.optimizer is not None:
            chunk.optimizer.set_options(fields["options"])
            chunk.optimizer.load_state(*_divided(own))
        chunk.changed_outside()
        if chunk.down is not None and sent is not None and residual is not None:
            chunk.sent = sent.clone()
            chunk.down.load(residual)
        chunk.version, chunk.ready = fields["version"], fields["ready"]
        chunk.square, chunk.workers = fields["square"], fields["workers"]


def _divided(states: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Tensors, and what was a number."""
    return (
        {name: value for name, value in states.items() if value.dim()},
        {name: float(value) for name, value in states.items() if not value.dim()},
    )


def state_of(
    shard: Any, with_weights: bool, only: set[int] | None = None
) -> dict[str, torch.Tensor]:
    """Copies of the optimizer's states by ``chunk\\tnumber\\tname``, numbers as float64 of shape
    []; and the values.

    `only`: these chunks, and all tables.
    """
    found: dict[str, torch.Tensor] = {}
    for chunk in list(shard.chunks.values()):
        if only is None or chunk.number in only:
            found |= state_of_chunk(chunk, with_weights)
    for table in list(shard.tables.values()):
        found |= state_of_table(table)
    return found


def load_state(shard: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Continue from what `state_of` gave.

    Raises:
        UserError: it is not of this server's chunks, or of another optimizer.
    """
    chunks: dict[int, dict[str, torch.Tensor]] = {}
    tables: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        kind, number, what = name.split("\t")
        (chunks if kind == "chunk" else tables).setdefault(int(number), {})[what] = value
    for one, states in chunks.items():
        chunk = shard.chunks[one]
        with chunk.lock:
            weights = states.pop(_WEIGHTS, None)
            if states.pop(ANEW, None) is not None:
                states.clear()
            if weights is not None:
                chunk.weights.copy_(weights)
            if states and chunk.optimizer is None:
                raise UserError(
                    "there is no optimizer whose state this could be; call set_optimizer first"
                )
            if chunk.optimizer is not None:
                chunk.optimizer.load_state(*_divided(states))
            chunk.changed_outside()
    for one, states in tables.items():
        table = shard.tables[one]
        with table.lock:
            table.rows.load(states)
