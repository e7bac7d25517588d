"""Which device trains which client."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def longest_first(costs: Sequence[float], devices: int) -> list[list[int]]:
    """Deal items out so that the device with the most to do has as little as this simple rule can reach: the next longest item
    goes to the device with the least (Graham, Bounds on Multiprocessing Timing Anomalies, 1969: at most 4/3 of the best).

    Args:
        costs: of each item, in any unit.
        devices: how many there are.

    Returns:
        For each device the items, by their places in `costs`, longest first.
    """
    dealt: list[list[int]] = [[] for _ in range(devices)]
    loads = [(0.0, device) for device in range(devices)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, device = heapq.heappop(loads)
        dealt[device].append(item)
        heapq.heappush(loads, (load + costs[item], device))
    return dealt
