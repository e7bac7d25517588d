"""What a rank asks for, and whether all ranks ask for the same."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allhands.horovod.reduce_ops import ADDITIVE

Key = tuple[int, str, str]  # process set, kind, name

_WIDTH = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "complex128": 16,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
}


@dataclass(frozen=True)
class OperationRequest:
    """One rank's part in an operation on a group of tensors (a single tensor is a group of one).

    Attributes:
        kind: "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier",
            "add_set" or "remove_set".
        shapes, dtypes: of each tensor; dtypes without "torch.".
        names: of each tensor, for messages; empty when the operation's own name is that of its only
            tensor.
        absent: the places of tensors that this rank has no value for, and gives zeros.
        op, pre, post: of reductions.
        device: "cpu" or "cuda".
        root: of a broadcast, counted in the whole world.
        splits: of an alltoall, rows for each rank; of "add_set" and "remove_set", the ranks.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    absent: tuple[int, ...] = ()
    op: str = ""
    pre: float = 1.0
    post: float = 1.0
    device: str = "cpu"
    root: int = 0
    splits: tuple[int, ...] = ()

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.names, self.shapes, self.dtypes, self.absent, self.op))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(
            math.prod(shape) * _WIDTH.get(dtype, 1)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def message(self) -> list[Any]:
        """As JSON carries it."""
        return [
            self.kind,
            self.shapes,
            self.dtypes,
            self.names,
            self.absent,
            self.op,
            self.pre,
            self.post,
            self.device,
            self.root,
            self.splits,
        ]

    @staticmethod
    def read(message: list[Any]) -> OperationRequest:
        """The inverse of `message`."""
        kind, shapes, dtypes, names, absent, op, pre, post, device, root, splits = message
        return OperationRequest(
            str(kind),
            tuple(tuple(map(int, shape)) for shape in shapes),
            tuple(map(str, dtypes)),
            tuple(map(str, names)),
            tuple(map(int, absent)),
            str(op),
            float(pre),
            float(post),
            str(device),
            int(root),
            tuple(map(int, splits)),
        )


def ranks_text(ranks: Any) -> str:
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))}"


def failure(kind: str, name: str, rank: int, error: Exception) -> str:
    """What all ranks are told of an operation that failed on one after it was agreed."""
    return f"{kind} {name!r} failed on rank {rank}: {type(error).__name__}: {error}"


def disagreement(
    name: str,
    asks: Mapping[int, OperationRequest],
    joined: Mapping[int, Any],
    members: tuple[int, ...],
) -> str | None:
    """Why the ranks' asks of this name cannot be one operation; None when they can.

    The text names the tensor, the ranks and what each of them gave.
    """
    first = next(iter(asks.values()))
    kind = first.kind
    away = [rank for rank in members if rank in joined]
    if away and kind not in ("allreduce", "barrier"):
        return (
            f"{kind} {name!r}: it is not possible after {ranks_text(away)} called join(); only "
            "allreduce and barrier are"
        )
    if away and kind == "allreduce" and first.op not in ADDITIVE:
        return (
            f"{kind} {name!r}: op {first.op} is not possible after {ranks_text(away)} called "
            "join(); use Sum or Average"
        )
    if all(ask == first for ask in asks.values()):
        return None
    text = (
        _differ(asks, lambda ask: ask.device, "a tensor on")
        or _differ(asks, lambda ask: len(ask.shapes), "a group with this number of tensors:")
        or _differ(asks, lambda ask: ask.op, "op")
        or _differ(asks, lambda ask: ask.pre, "prescale_factor")
        or _differ(asks, lambda ask: ask.post, "postscale_factor")
        or _differ(asks, lambda ask: ask.root, "root_rank")
    )
    if text:
        return f"{kind} {name!r}: {text}; all ranks must give the same"
    ragged = kind in ("allgather", "alltoall")
    for place in range(len(first.shapes)):
        tensor = first.names[place] if first.names else name
        within = "" if tensor == name else f" in the group {name!r}"
        text = (
            _differ(
                asks,
                lambda ask, place=place: ask.names[place] if ask.names else name,
                "the tensor",
                repr,
            )
            or _differ(asks, lambda ask, place=place: ask.dtypes[place], "dtype")
            or _differ(
                asks,
                lambda ask, place=place: ask.shapes[place][1 if ragged else 0 :],
                _SHAPE[ragged],
                _as_list,
            )
        )
        if text:
            return f"{kind} {tensor!r}{within}: {text}; all ranks must give the same"
    if kind in ("add_set", "remove_set") and (
        text := _differ(asks, lambda ask: ask.splits, "the ranks")
    ):
        return (
            f"{'add' if kind == 'add_set' else 'remove'}_process_set: {text}; all ranks must "
            "give the same"
        )
    return None


_SHAPE = {False: "shape", True: "shape without its first dimension"}


def _as_list(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _differ(
    asks: Mapping[int, OperationRequest], value: Any, what: str, show: Any = str
) -> str | None:
    groups: dict[Any, list[int]] = defaultdict(list)
    for rank, ask in asks.items():
        groups[value(ask)].append(rank)
    if len(groups) == 1:
        return None
    ordered = sorted(groups.items(), key=lambda item: min(item[1]))
    return ", ".join(f"{ranks_text(ranks)} gave {what} {show(found)}" for found, ranks in ordered)
