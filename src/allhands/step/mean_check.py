"""Whether a criterion is a mean over the samples, as far as its values on a batch and on two parts
of it show.

Only a mean over samples, or what says its own count, can be put together from micro-batches and
workers. A function does not say what it is, so its first values are looked at. Nothing is asked of
it after the first steps.
"""

from __future__ import annotations

import copy
import functools
import math
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from allhands.data.random import preserved_generators
from allhands.data.trees import map_tensors
from allhands.errors import kind_of

# Numbers in the samples that are compared; a language model's outputs are among the largest tensors
# of a step.
_NUMBERS = 1 << 18
# One-sample micro-batches that are put together to be compared, and steps after which nobody waits
# for more of them.
_POOLED, _STEPS = 4, 8
# How far values may differ, relative to the largest, beside what another order of the samples does.
_LIMITS = {torch.float64: 1e-8, torch.float32: 1e-4}


class MeanCheck:
    """Looks at a criterion's first outputs and targets.

    Args:
        call: the criterion.

    Attributes:
        found: what is wrong with it, with what to write instead; "" when it is a mean over the
            samples, and None as long as nothing is known.
    """

    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        self.call = call
        self.found: str | None = None
        self.steps = 0
        self._pooled: list[Any] = []

    def look(self, output: Any, target: Any) -> None:
        """Compare the criterion's values on some samples of a micro-batch. Neither the random
        generators nor the criterion's own state know of it."""
        if self.found is not None or not self.waits:
            return
        size = _common_length(output, target)
        if size is None:
            self.steps = _STEPS  # no later batch is another
            return
        if size == 1:
            self._pooled.append(map_known((output, target), torch.Tensor.detach))
            joined = _join(self._pooled) if 2 <= len(self._pooled) <= _POOLED else None
            if joined is None:
                return
            (output, target), size = joined, len(self._pooled)
        try:
            with torch.no_grad(), preserved_generators(), _state_kept(self.call), _plainly():
                self.found = self._compare(output, target, size)
        except (
            Exception
        ):  # it takes no batch of another size, or needs gradients: it is not accused
            self.steps = _STEPS
        if self.found is not None:
            self._pooled = []

    @property
    def waits(self) -> bool:
        """Whether another step may tell more."""
        return self.steps < _STEPS

    def _compare(self, output: Any, target: Any, size: int) -> str | None:
        per_row = sum(leaf.numel() for leaf in leaves_of((output, target))) // size
        number = max(2, min(size, _NUMBERS // max(per_row, 1)))
        first = max(1, number // 3)
        wide, values = torch.float64, []
        for wide in (torch.float64, torch.float32):
            try:
                values = self._values(output, target, size, number, first, wide)
            except Exception:
                if wide is torch.float32:  # it takes inputs of its own format alone
                    raise
                continue
            break
        whole, again, turned, *parts = values
        if whole != again or not math.isfinite(whole):
            return None  # it draws, or counts its calls
        # In two places, since parts may count in proportion to their samples by accident.
        cuts = [(first, parts[:2]), (number - first, parts[2:])]
        means = [(size * one + (number - size) * other) / number for size, (one, other) in cuts]
        totals = [sum(pair) for _, pair in cuts]
        scale = max(map(abs, values))
        limit = _LIMITS[wide] * scale + min(10 * abs(whole - turned), 1e-3 * scale)
        scalars = any(not leaf.dim() for leaf in leaves_of(output))
        if scalars and all(part == whole for part in parts):
            return _own(self.call)
        if all(abs(whole - mean) <= limit for mean in means):
            return ""
        if all(abs(whole - total) <= limit for total in totals):
            return _sum(self.call)
        size, mean = next(
            (size, mean)
            for (size, _), mean in zip(cuts, means, strict=True)
            if not abs(whole - mean) <= limit
        )
        return _neither(self.call, whole, mean, (size, number - size))

    def _values(
        self, output: Any, target: Any, size: int, number: int, first: int, wide: torch.dtype
    ) -> list[float]:
        def value(rows: torch.Tensor) -> torch.Tensor:
            with _state_kept(self.call):
                loss = self.call(
                    *map_known((output, target), lambda leaf: _rows(leaf, rows, size, wide))
                )
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TypeError("no number")
            return loss.reshape(()).double()

        rows = torch.arange(number)
        last = number - first
        parts = (rows, rows, rows.flip(0), rows[:first], rows[first:], rows[:last], rows[last:])
        return torch.stack([value(part) for part in parts]).tolist()


def _name(call: Any) -> str:
    function = call.func if isinstance(call, functools.partial) else call
    name: str = getattr(function, "__name__", type(function).__name__)
    return "fn" if name == "<lambda>" else name


def _neither(call: Any, whole: float, mean: float, parts: tuple[int, int]) -> str:
    name = _name(call)
    return (
        f"the criterion {name} is no mean over the samples: on {sum(parts)} samples it is "
        f"{whole:.6g}, and the mean of its values on {parts[0]} and {parts[1]} of them, weighted "
        f"by their number, is {mean:.6g}. Micro-batches and workers see parts of a batch, which do "
        f"not make it up. Write criterion=allhands.PerTarget({name}) where it is a mean over the "
        "targets that are not ignore_index; let it return (sum, count), its sum and what that is "
        f"divided by; or write criterion=allhands.OverBatch({name}) where it compares the samples "
        "of a batch with one another"
    )


def _sum(call: Any) -> str:
    name = _name(call)
    return (
        f"the criterion {name} is a sum over the samples, and would be weighted as if it were a "
        f"mean. Write {name}.reduction = 'sum' beside it, and the gradient is that of the sum over "
        "the global batch; or let it return (sum, number of samples) for the mean"
    )


def _own(call: Any) -> str:
    return (
        f"the criterion {_name(call)} returns a loss that the model has computed, and cannot show "
        "what it is a mean over. Write criterion=allhands.ModelLoss() for a mean over the labels "
        "that are not -100 (ModelLoss(shift=True) in causal language models), "
        "allhands.ModelLoss(over='samples') for a mean over samples, or let it return (sum, count)"
    )


# --------------------------------------------------------------------- parts of outputs and targets


class NotCutError(Exception):
    """Something that has no rows."""


def map_known(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A tree with its tensors changed; raises `NotCutError` for what may hold samples in a way that
    nobody knows."""

    def refuse(other: Any) -> Any:
        if other is not None:
            raise NotCutError(kind_of(other))

    return map_tensors(
        value, lambda leaf: change(leaf) if type(leaf) is torch.Tensor else refuse(leaf), refuse
    )


def leaves_of(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_known(value, found.append)
    return found


def _common_length(output: Any, target: Any) -> int | None:
    """The first dimension that all tensors share, those without dimensions aside; None where that
    may be something else."""
    try:
        leaves = leaves_of((output, target))
    except NotCutError:
        return None
    if isinstance(output, list) and type(target) is not torch.Tensor:
        return None  # it may be a list of samples
    lengths = {len(leaf) for leaf in leaves if leaf.dim()}
    if len(lengths) != 1:
        return None
    return lengths.pop() or None


def _join(parts: list[Any]) -> Any:
    """Trees of one row each as one tree; None where they do not fit together."""
    leaves = [leaves_of(part) for part in parts]
    if any(
        [leaf.shape for leaf in other] != [leaf.shape for leaf in leaves[0]]
        or not all(leaf.dim() for leaf in other)
        for other in leaves
    ):
        return None
    columns = zip(*leaves, strict=True)
    return map_known(parts[0], lambda _: torch.cat(next(columns)))


def _rows(leaf: torch.Tensor, rows: torch.Tensor, size: int, wide: torch.dtype) -> torch.Tensor:
    part = leaf[rows.to(leaf.device)] if leaf.dim() and len(leaf) == size else leaf.clone()
    return part.to(wide) if part.is_floating_point() else part


# ---------------------------------------------------------------------- leaving no trace


@contextmanager
def _plainly() -> Iterator[None]:
    """Within, nothing is cast or compiled."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            torch.compiler.set_stance("default")


@contextmanager
def _state_kept(criterion: Any) -> Iterator[None]:
    """A criterion's attributes, buffers, lists and dicts, and those of what it closes over, are as
    before afterwards."""
    reachable = _reachable(criterion)
    before = [(vars(held), dict(vars(held))) for held in reachable if hasattr(held, "__dict__")]
    inner = [value for held in reachable for value in (held, *_inside(held))]
    tensors = [
        (value, value.clone(), value._version) for value in inner if isinstance(value, torch.Tensor)
    ]
    boxes = [
        (value, copy.copy(value)) for value in inner if type(value) in (list, dict, set, deque)
    ]
    try:
        yield
    finally:
        for holder, kept in before:
            for name in holder.keys() - kept.keys():
                del holder[name]
            holder.update(
                {name: value for name, value in kept.items() if holder.get(name, kept) is not value}
            )
        for tensor, values, version in tensors:
            # A tensor that was not changed may be needed by a backward pass, as it is.
            if tensor._version != version:
                tensor.copy_(values)
        for box, members in boxes:
            box.clear()
            if isinstance(box, (list, deque)):
                box.extend(members)
            else:
                box.update(members)


def _reachable(criterion: Any) -> list[Any]:
    """The criterion, the modules in it, and what it is a method of, a partial of, or closes
    over."""
    if isinstance(criterion, (type, types.ModuleType)):
        return []
    if isinstance(criterion, nn.Module):
        return list(criterion.modules())
    if isinstance(criterion, functools.partial):
        return [
            held
            for part in (criterion.func, *criterion.args, *criterion.keywords.values())
            for held in _reachable(part)
        ]
    if hasattr(criterion, "__self__"):
        return _reachable(criterion.__self__)
    cells = getattr(criterion, "__closure__", None) or ()
    return [criterion, *(held for cell in cells for held in _held(cell))]


def _held(cell: Any) -> list[Any]:
    try:
        value = cell.cell_contents
    except ValueError:  # it is not filled yet
        return []
    if isinstance(value, (type, types.ModuleType)):
        return []
    return list(value.modules()) if isinstance(value, nn.Module) else [value]


def _inside(held: Any) -> list[Any]:
    """The values in an object, and in a module's buffers."""
    values = list(getattr(held, "__dict__", {}).values())
    return values + (list(held._buffers.values()) if isinstance(held, nn.Module) else [])
