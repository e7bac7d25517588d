"""Seconds of single operations: measured on a device, or what a card's peaks give."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from allhands.compat import pytree
from allhands.errors import UserError
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
        self.by_peaks = 0
        self.correction = correction
        self._impossible: set[str] = set()

    def __call__(self, operation: Operation) -> float:
        key = operation.key
        if key not in self.known and self.device is not None and key not in self._impossible:
            seconds = measured(operation, self.device)
            if seconds is None:
                self._impossible.add(key)
            else:
                self.known[key] = seconds
        if key in self.known:
            return self.known[key]
        self.by_peaks += 1
        return self.card.seconds(operation.flops, operation.moved, operation.width)

    def in_step(self, phase: str, operation: Operation) -> float:
        """Of an operation in this phase of a step on a processor."""
        return self.correction(phase, self(operation))


def measured(operation: Operation, device: torch.device) -> float | None:
    """Seconds of an operation on a device, the median of a few; None where it cannot be run."""
    try:
        args, kwargs = pytree.tree_map(lambda one: _made(one, device), operation.call)
        call = lambda: operation.function(*args, **kwargs)  # noqa: E731
        times = [_timed(call, device)]
        turns = _WARM + _TURNS if times[0] < _LONG_S else 0
        times += [_timed(call, device) for _ in range(turns)]
    except (RuntimeError, TypeError, NotImplementedError):  # no memory for it, or no such kernel
        return None
    return statistics.median(times[_WARM:] or times)


def _made(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.device):
        return device
    if not isinstance(value, Form):
        return value
    tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    return tensor.zero_()


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def read_times(path: Path) -> dict[str, float]:
    """Measured operations of a file that `write_times` has written.

    Raises:
        UserError: it is none.
    """
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
        # `allhands doctor --profile` has measured links alone.
        found = profile.get("operations", {}) if "links" in profile else profile["operations"]
        return {str(key): float(value) for key, value in found.items()}
    except FileNotFoundError:
        raise UserError(
            f"{path} is not there; `allhands plan --measure --profile {path}` writes it"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} has no measured operations; `allhands plan --measure --profile FILE` writes "
            "such a file"
        ) from None


def read_correction(path: Path) -> StepCorrection:
    """What `write_times` has written of real steps; none where it has nothing."""
    found = json.loads(path.read_text(encoding="utf-8")).get("correction", {})
    return StepCorrection(**{str(key): float(value) for key, value in found.items()})


def write_times(path: Path, times: OperationTimes) -> None:
    """Write down what was measured, for machines without the card, beside links that are there."""
    device = times.device
    name = torch.cuda.get_device_name(device) if device and device.type == "cuda" else str(device)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found |= {"device": name, "torch": torch.__version__, "operations": times.known}
    found["correction"] = vars(times.correction)
    text = json.dumps(found, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
