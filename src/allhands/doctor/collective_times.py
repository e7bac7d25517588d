"""How long collectives of several sizes take, and how much of a processor's time: what
`allhands plan --profile` knows its links by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from allhands.world import World

SIZES = tuple(1 << power for power in range(12, 23, 2))  # bytes: 4 KiB to 4 MiB
# Each is repeated for about so many seconds, and so often at least and at most.
_EACH_S = 0.3
_LEAST, _MOST = 3, 40
# Numbers that are added up between two calls.
_BETWEEN = 2**22
# A size is left out where it would take so many times longer than this.
_LONGEST_S = 1.5


def collective_times(world: World) -> dict[str, list[dict[str, float]]]:
    """By the kind of a collective, for each size: `bytes` as `allhands.comm.traffic.Collective`
    has them, `seconds` of one, the mean on the slowest rank, and `cpu`, the processor's seconds
    of this process meanwhile. All ranks call it together.

    A step has many, whose sum goes by the mean: on processors that also compute, some take many
    times the median."""
    found = {}
    for kind, make in _KINDS.items():
        rows: list[dict[str, float]] = []
        for size in SIZES:
            if rows and rows[-1]["seconds"] * size / rows[-1]["bytes"] > _LONGEST_S:
                break
            timed = _timed(make(size, world), world)
            count = _MESSAGES.get(kind, 1)
            rows.append({"bytes": size, **{key: one / count for key, one in timed.items()}})
        found[kind] = rows
    return found


def _timed(call: Callable[[], None], world: World) -> dict[str, float]:
    def once() -> float:
        began = time.perf_counter()
        call()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        return time.perf_counter() - began

    # As in a step, other data pass through the caches in between.
    other = torch.zeros(_BETWEEN, device=world.device)
    once()  # makes connections
    slowest = _most([once()], world)[0]
    count = min(_MOST, max(_LEAST, int(_EACH_S / max(slowest, 1e-6))))
    dist.barrier()
    seconds, busy = [], 0.0
    for _ in range(count):
        other.add_(1.0)
        dist.barrier()  # who comes late is no matter of the link
        before = time.process_time()
        seconds.append(once())
        busy += time.process_time() - before
    return {"seconds": statistics.fmean(_most(seconds, world)), "cpu": busy / count}


def _most(values: list[float], world: World) -> list[float]:
    """Of each value the largest of all ranks."""
    every = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return every.tolist()


def _numbers(size: int, world: World) -> torch.Tensor:
    return torch.zeros(size // 4, device=world.device)


def _part(size: int, world: World) -> torch.Tensor:
    return torch.zeros(size // 4 // world.world_size, device=world.device)


def _whole(size: int, world: World) -> torch.Tensor:
    return torch.zeros(size // 4 // world.world_size * world.world_size, device=world.device)


def _all_reduce(size: int, world: World) -> Callable[[], None]:
    tensor = _numbers(size, world)
    return lambda: dist.all_reduce(tensor) and None


def _all_gather(size: int, world: World) -> Callable[[], None]:
    whole, part = _whole(size, world), _part(size, world)
    return lambda: dist.all_gather_into_tensor(whole, part) and None


def _reduce_scatter(size: int, world: World) -> Callable[[], None]:
    whole, part = _whole(size, world), _part(size, world)
    return lambda: dist.reduce_scatter_tensor(part, whole) and None


def _all_to_all(size: int, world: World) -> Callable[[], None]:
    out, given = _whole(size, world), _whole(size, world)
    return lambda: dist.all_to_all_single(out, given) and None


def _broadcast(size: int, world: World) -> Callable[[], None]:
    tensor = _numbers(size, world)
    return lambda: dist.broadcast(tensor, 0) and None


def _send(size: int, world: World) -> Callable[[], None]:
    """A message from each rank with an even number to the next one, and one back."""
    tensor = _numbers(size, world)
    even = world.rank % 2 == 0
    other = world.rank + 1 if even else world.rank - 1

    def call() -> None:
        if other >= world.world_size:
            return
        first, second = (dist.send, dist.recv) if even else (dist.recv, dist.send)
        first(tensor, other)
        second(tensor, other)

    return call


# Messages of one call, of which one is told.
_MESSAGES = {"send": 2}
_KINDS: dict[str, Callable[[int, World], Callable[[], None]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}
