"""Which device trains which client: longest first by what clients are known to cost, and the rest
to whoever is free."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch

from allhands.compat import default_store
from allhands.world import World

_AHEAD = 0.75  # of the predicted cost is dealt in advance
# seconds that a pull is worth at least: asking the store takes less than a hundredth of it
_PIECE = 0.02
_TRUST = 0.5  # how much the newest measured time counts against those before


def longest_first(costs: Sequence[float], devices: int) -> list[list[int]]:
    """Deal items out so that the device with the most to do has as little as this simple rule can
    reach: the next longest item goes to the device with the least (Graham, Bounds on
    Multiprocessing Timing Anomalies, 1969: at most 4/3 of the best).

    Args:
        costs: of each item, in any unit.
        devices: how many there are.

    Returns:
        For each device the items, by their places in `costs`, longest first.
    """
    dealt: list[list[int]] = [[] for _ in range(devices)]
    loads = [(0.0, device) for device in range(devices)]
    for item in _by_cost(costs):
        load, device = heapq.heappop(loads)
        dealt[device].append(item)
        heapq.heappush(loads, (load + costs[item], device))
    return dealt


def deal(costs: Sequence[float], devices: int) -> tuple[list[list[int]], list[list[int]]]:
    """Deal the longest items out in advance, and leave the shortest ones in groups for devices that
    have finished early.

    Args:
        costs: predicted seconds of each item.
        devices: how many there are.

    Returns:
        What each device has in advance, and the groups in the order in which they are pulled.
    """
    order, total = _by_cost(costs), sum(costs)
    rest, left = [], 0.0
    while order and left + costs[order[-1]] <= (1 - _AHEAD) * total:
        rest.append(order.pop())
        left += costs[rest[-1]]
    if left < devices * _PIECE:  # too little to even anything out
        order, rest = [*order, *reversed(rest)], []
    dealt = [
        [order[place] for place in places]
        for places in longest_first([costs[item] for item in order], devices)
    ]
    groups: list[list[int]] = []
    worth = _PIECE
    for item in reversed(rest):
        if worth >= _PIECE:
            groups.append([])
            worth = 0.0
        groups[-1].append(item)
        worth += costs[item]
    return dealt, groups


def _by_cost(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda item: (-costs[item], item))


class Costs:
    """What clients are expected to take: their steps at first, and measured seconds once there are
    some.

    Every rank learns the same from the figures of all clients, so that all ranks deal alike.
    """

    def __init__(self) -> None:
        #: Seconds a step, over all clients; None before the first round.
        self.each: float | None = None
        self._own: dict[int, float] = {}

    def predict(self, clients: Sequence[int], steps: Sequence[int]) -> list[float]:
        """Seconds of each client for so many steps; steps as they are before anything was
        measured."""
        each = 1.0 if self.each is None else self.each
        return [
            self._own.get(client, each) * count
            for client, count in zip(clients, steps, strict=True)
        ]

    def learn(
        self, clients: Sequence[int], steps: Sequence[float], seconds: Sequence[float]
    ) -> None:
        """Take in what clients took; those of no steps did not train and say nothing."""
        known = [
            (client, n, s)
            for client, n, s in zip(clients, steps, seconds, strict=True)
            if n > 0 and s > 0
        ]
        if not known:
            return
        self.each = _blend(self.each, sum(s for _, _, s in known) / sum(n for _, n, _ in known))
        for client, count, taken in known:
            self._own[client] = _blend(self._own.get(client), taken / count)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "each": self.each,
            "clients": torch.tensor(list(self._own), dtype=torch.int64),
            "own": torch.tensor(list(self._own.values()), dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.each = state["each"]
        self._own = dict(zip(state["clients"].tolist(), state["own"].tolist(), strict=True))


def _blend(before: float | None, measured: float) -> float:
    return measured if before is None else (1 - _TRUST) * before + _TRUST * measured


def common_store(world: World, what: str) -> Any:
    """A part of the world's store that all ranks share, and that is new at every call; None where
    there is no other rank, or no store (torch's own mpi)."""
    if world.world_size == 1:
        return None
    from torch.distributed import PrefixStore

    shared = default_store()
    if shared is None:
        return None
    # Each rank counts its calls by itself, and all count alike.
    return PrefixStore(
        f"allhands/federated/{what}/{shared.add(f'allhands/federated/{what}/{world.rank}', 1)}",
        shared,
    )


class Queue:
    """Groups of clients that ranks pull, one at a time, through a counter in the world's store.

    Args:
        world: the ranks; all of them make the queue, begin the same rounds and end them together.
    """

    def __init__(self, world: World) -> None:
        self._store, self._rank, self._key = common_store(world, "queue"), world.rank, ""
        self._groups: Sequence[Any] = ()

    def __bool__(self) -> bool:
        """Whether there is anything that ranks could pull from."""
        return self._store is not None

    def begin(self, round_: int, groups: Sequence[Any]) -> None:
        """Fill it, with the same groups on every rank; what lay in it before was pulled and its
        round is over on all ranks."""
        if self._groups and self._rank == 0:
            self._store.delete_key(self._key)
        self._groups, self._key = groups, str(round_)

    def pull(self) -> Any:
        """The next group that no rank has; None when all are taken."""
        if not self._groups:
            return None
        place = self._store.add(self._key, 1) - 1
        return self._groups[place] if place < len(self._groups) else None
