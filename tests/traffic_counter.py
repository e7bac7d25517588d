"""Counts what a rank sends and receives."""

from __future__ import annotations

from typing import Any

from allhands.comm.traffic import Collective, transfer_of
from allhands.compat import TorchDispatchMode


class TrafficCounter(TorchDispatchMode):
    """Within, the collectives of this thread, and of its backward passes, are counted, and what
    this thread sends to parameter servers and gets from them.

    Attributes:
        transfers: those of groups of several ranks, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[Collective] = []

    def note(self, transfer: Collective) -> None:
        self.transfers.append(transfer)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (found := transfer_of(function, args)) is not None and found.size > 1:
            self.transfers.append(found)
        return function(*args, **(kwargs or {}))
