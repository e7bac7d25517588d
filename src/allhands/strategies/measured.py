"""The size of the buckets in which gradients travel, chosen by measuring a few."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allhands.data import tensors_in
from allhands.errors import UserError
from allhands.strategies.base import TryOn
from allhands.strategies.trial_call import on_training_data, wait_for
from allhands.world import World

#: In MB. None is PyTorch's own choice: 25, and 1 for the first bucket.
CANDIDATES: tuple[float | None, ...] = (None, 1, 5, 100)
_USUAL = 25
# Sizes whose steps take as long as the shortest but for so much are equal: measured again, another
# one may be the first.
_ALIKE = 1.03
# Steps that are not counted: PyTorch lays its buckets out anew in the second.
_WARM = 3
_SECONDS = 1.0  # for a size


def check_cap(given: Any) -> None:
    """Raise `UserError` for a size of buckets that there is not."""
    number = (
        isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < math.inf
    )
    if not (given is None or given == "measured" or number):
        raise UserError(
            f"DDP(bucket_cap_mb={given!r}); it must be a positive number of MB, such as {_USUAL}, "
            "or 'measured', or None for PyTorch's default"
        )


def candidates_for(gradients: int) -> list[float | None]:
    """The sizes of buckets that lay so many bytes of gradients out differently."""
    megabytes = gradients / 2**20
    sizes = sorted(float(cap or _USUAL) for cap in CANDIDATES)
    # The smallest that holds all in one bucket does what larger ones do.
    enough = next((size for size in sizes if size >= megabytes), sizes[-1])
    if megabytes > sizes[0]:
        return [cap for cap in CANDIDATES if cap is None or cap <= enough]
    return [None]


def fastest(
    make: Callable[[float | None], Callable[[], object]],
    candidates: Sequence[float | None],
    world: World,
) -> tuple[float | None, dict[float | None, float]]:
    """The size of buckets with which a step takes the shortest time; all ranks call it together.

    Args:
        make: ``(size in MB, or None)`` to a function that takes one step (forward and backward pass
            with the exchange), and returns once all of it is on its way.
        candidates: sizes to try.
        world: the ranks.

    Returns:
        The size, the same on all ranks: the first candidate of those that are within 3 % of the
            fastest. And by size the seconds
        of a step: the median of a few, on the slowest rank.
    """
    times: dict[float | None, float] = {}
    for cap in candidates:
        step = make(cap)
        warm = [_seconds(step, world) for _ in range(_WARM)]
        steps = min(20, max(3, int(_SECONDS / _slowest(warm[-1], world))))
        times[cap] = _slowest(statistics.median(_seconds(step, world) for _ in range(steps)), world)
        del step
        gc.collect()  # before the next copy of the model
    limit = _ALIKE * min(times.values())
    return next(cap for cap in candidates if times[cap] <= limit), times


def said(cap: float | None, times: dict[float | None, float]) -> str:
    """The choice in words, with what was measured."""
    if cap is not None:
        chosen = f"bucket_cap_mb={_number(cap)}"
    else:
        chosen = f"bucket_cap_mb=None, which is {_USUAL}"
    if not times:
        return (
            f"{chosen} (not measured: all gradients are less than "
            f"{_number(min(filter(None, CANDIDATES)))} MB)"
        )
    measured = ", ".join(
        f"{_number(size)}: {1e3 * seconds:.3g} ms"
        for size, seconds in sorted((c or _USUAL, t) for c, t in times.items())
    )
    return f"{chosen} (measured: {measured})"


def on_first_samples(
    try_on: TryOn, measure: Callable[[Callable[[nn.Module], Any]], Any], device: torch.device
) -> Any:
    """What ``measure(call)`` gives, where ``call(module)`` calls a module as the runner calls the
    model; see `on_training_data`."""

    def measure_call(*args: Any, **kwargs: Any) -> Any:
        return measure(lambda module: module(*args, **kwargs))

    try:
        return on_training_data(try_on, 1, measure_call, device)
    except UserError as error:
        raise UserError(
            f"DDP(bucket_cap_mb='measured'): {error}. Or set bucket_cap_mb to {_USUAL}"
        ) from None


def backward_of(output: Any) -> None:
    """A backward pass from all that is in a model's output and has a gradient; from ones, since the
    loss is not at hand."""
    found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    torch.autograd.backward(found, [torch.ones_like(tensor) for tensor in found])


def without_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _seconds(step: Callable[[], object], world: World) -> float:
    wait_for(world.device)
    began = time.perf_counter()
    step()
    wait_for(world.device)
    return time.perf_counter() - began


def _slowest(seconds: float, world: World) -> float:
    """Of the ranks' times."""
    value = torch.tensor([seconds], dtype=torch.float64, device=world.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _number(megabytes: float) -> str:
    return f"{megabytes:g}"
