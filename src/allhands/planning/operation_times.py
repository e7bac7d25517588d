"""Seconds of single operations: measured on a device, or what a card's peaks give."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from allhands.compat import pytree
from allhands.planning.gpu_times import (
    Call,
    call_on_gpu,
    largest_number,
    seconds_on_gpu,
    workspace_of,
)
from allhands.planning.machines import Card
from allhands.planning.operation import Form, Operation
from allhands.planning.step_correction import ALONE, StepCorrection

_WARM, _TURNS = 2, 5
# An operation that takes so long is not repeated.
_LONG_S = 0.5


class OperationTimes:
    """Seconds of operations.

    Args:
        card: whose published peaks stand in for what was not measured.
        known: measured seconds, by `Operation.key`.
        device: on which to measure what is not known; None measures nothing.
        correction: of operations on a processor, by what steps have taken.

    Attributes:
        known: also what was measured since.
        launch: seconds in which the host hands over one operation; None where that was not
            measured.
        own: seconds of a step that a strategy takes on a processor beside its operations, by its
            name: for its own code, or for the exchange with its servers.
        workspaces: bytes that they take while they are computed, of those measured on a GPU.
        by_peaks: how many operations had no measured time.
    """

    def __init__(
        self,
        card: Card,
        known: dict[str, float] | None = None,
        device: torch.device | None = None,
        correction: StepCorrection = ALONE,
    ) -> None:
        self.card, self.device = card, device
        self.known = dict(known or {})
        self.launch: float | None = None
        self.workspaces: dict[str, int] = {}
        self.own: dict[str, float] = {}
        self.by_peaks = 0
        self.correction = correction
        self._impossible: set[str] = set()

    def __call__(self, operation: Operation) -> float:
        key = operation.key
        if key not in self.known and self.device is not None and key not in self._impossible:
            found = measured(operation, self.device)
            if found is None:
                self._impossible.add(key)
            else:
                self.known[key], self.workspaces[key] = found
        if key in self.known:
            return self.known[key]
        self.by_peaks += 1
        return self.card.seconds(operation.flops, operation.moved, operation.width)

    def in_step(self, phase: str, operation: Operation) -> float:
        """Of an operation in this phase of a step on a processor."""
        return self.correction(phase, self(operation))


def measured(operation: Operation, device: torch.device) -> tuple[float, int] | None:
    """Seconds of an operation on a device, the median of a few, and bytes that it takes meanwhile
    beside what it gives, of which only a GPU tells; None where it cannot be run."""
    try:
        args, kwargs = _arguments_of(operation, device)
        call: Call = lambda: operation.function(*args, **kwargs)  # noqa: E731
        if device.type == "cuda":
            other = call_on_gpu(operation.name, args, kwargs)
            # A backward pass runs on a thread of its own, which is not captured here.
            seconds = seconds_on_gpu(other or call, device, captured=other is None)
            return seconds, workspace_of(other or call, device)
        times = [_timed(call)]
        turns = _WARM + _TURNS if times[0] < _LONG_S else 0
        times += [_timed(call) for _ in range(turns)]
    except (RuntimeError, TypeError, NotImplementedError):  # no memory for it, or no such kernel
        return None
    return statistics.median(times[_WARM:] or times), 0


def _arguments_of(operation: Operation, device: torch.device) -> Any:
    leaves = pytree.tree_leaves(operation.call)
    shapes = [one.shape for one in leaves if isinstance(one, Form)]
    bound = largest_number(operation.name, shapes, operation.call[0])
    return pytree.tree_map(lambda one: _made(one, device, bound), operation.call)


def _made(value: Any, device: torch.device, bound: int) -> Any:
    if isinstance(value, torch.device):
        return device
    if not isinstance(value, Form):
        return value
    # Of an expanded tensor each number is made once.
    shape = [
        1 if stride == 0 else size for size, stride in zip(value.shape, value.stride, strict=True)
    ]
    tensor = torch.empty_strided(shape, value.stride, dtype=value.dtype, device=device)
    if value.dtype.is_floating_point:
        # Products of zeros take less power, and so less time; square roots of negative numbers
        # take many times longer.
        tensor.normal_().abs_()
    elif bound > 1:
        tensor.random_(bound)
    else:
        tensor.zero_()
    return tensor.expand(value.shape)


def _timed(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def device_name(device: torch.device | None) -> str | None:
    """What PyTorch calls a GPU; of a processor "cpu"."""
    if device is None or device.type != "cuda":
        return None if device is None else device.type
    return torch.cuda.get_device_name(device)
