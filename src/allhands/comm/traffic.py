"""What a rank sends and receives, counted where PyTorch hands a collective to its backend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from allhands.compat import dispatch_modes

# The operations of torch.distributed and those of its functional collectives, by what they do.
_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_": "reduce",
}
# Those whose tensors are first what comes out, and then what goes in.
_OUT_FIRST = frozenset(
    {
        "allgather_",
        "_allgather_base_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_",
        "alltoall_",
        "alltoall_base_",
        "scatter_",
        "gather_",
    }
)


#: In the place of a group's name, where the peer of a message is a parameter server.
SERVERS = "servers"


@dataclass(frozen=True)
class Collective:
    """One collective, or one message.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather",
            "scatter", "reduce", "send" or "recv".
        payload: bytes: of the whole tensor that all ranks have in the end (all_reduce, all_gather,
            broadcast), or that they have in the beginning (the others).
        size: ranks of the group.
        group: the name of the group, or `SERVERS`.
        peer: of a message, the rank in the group that it goes to or comes from, or the number of
            the server; else -1.
        asynchronous: the caller goes on beside it.
    """

    kind: str
    payload: int
    size: int
    group: str = ""
    peer: int = -1
    asynchronous: bool = False

    @property
    def sent(self) -> float:
        """Bytes that leave a rank by a ring; of a broadcast, the mean over the ranks."""
        if self.kind == "recv":
            return 0.0
        return self._over_links()

    @property
    def received(self) -> float:
        """Bytes that come to a rank by a ring; of a broadcast, the mean over the ranks."""
        if self.kind == "send":
            return 0.0
        return self._over_links()

    def _over_links(self) -> float:
        if self.kind in ("send", "recv"):
            return float(self.payload)
        ways = 2 if self.kind == "all_reduce" else 1
        return ways * self.payload * (self.size - 1) / self.size


@runtime_checkable
class CountsTraffic(Protocol):
    """A dispatch mode that hears of messages which go past torch.distributed."""

    def note(self, transfer: Collective) -> None: ...


def tell(transfer: Collective) -> None:
    """Tell whoever counts in this thread of a message that goes past torch.distributed."""
    for mode in dispatch_modes():
        if isinstance(mode, CountsTraffic):
            mode.note(transfer)


def transfer_of(function: Any, args: tuple[Any, ...]) -> Collective | None:
    """What an operation sends, or None where it is no collective with a payload."""
    if function.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = function._schema.name.split("::")[1]
    kind = _KINDS.get(name)
    if kind is None:
        return None
    group = _group_of(function.namespace, args)
    size = group.size()
    tensors = args[1] if name in _OUT_FIRST else args[0]
    payload = sum(tensor.nbytes for tensor in _flat(tensors))
    if kind in ("all_gather", "gather"):
        payload *= size
    given = dict(zip(_arguments(function), args, strict=False))
    peer = given.get("dst", given.get("src", -1))
    beside = "async_op" in _arguments(function) and given.get("async_op", True)
    return Collective(kind, payload, size, group.group_name, peer, bool(beside))


def _arguments(function: Any) -> list[str]:
    return [one.name for one in function._schema.arguments]


def _group_of(namespace: str, args: tuple[Any, ...]) -> Any:
    if namespace == "_c10d_functional":
        from allhands.compat import group_named

        return group_named([value for value in args if isinstance(value, str)][-1])
    boxed = next(value for value in args if isinstance(value, torch.ScriptObject))
    return dist.ProcessGroup.unbox(boxed)


def _flat(tensors: Any) -> Iterable[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, (list, tuple)):
        for one in tensors:
            yield from _flat(one)
