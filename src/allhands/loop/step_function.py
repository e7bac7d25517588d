"""A function of the user's that computes the loss of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.compat import pytree
from allhands.data import preserved_generators
from allhands.data.trees import map_tensors
from allhands.errors import UserError, kind_of
from allhands.loop.generators import generator_states, have_drawn
from allhands.loop.task import Objective
from allhands.step import LossRule
from allhands.step.mean_check import MeanCheck
from allhands.step.modes import evaluation_mode

if TYPE_CHECKING:
    from allhands.loop.own_steps import OwnSteps

# How far the mean of a function's values on two parts of a batch may be from its value on the
# whole, relative to the largest of them: parts of a batch are computed in another order.
_LIMIT = 1e-3


class Rows:
    """What a step function is called on: a micro-batch, and what is known of it.

    Attributes:
        batch: as the loader gave it.
        count: its samples; 0 where it is there for the ranks that wait in their own call.
        first: position of its first sample in the global batch.
        total: samples of the global batch.
        draws: tensors of random numbers that were drawn for it.
    """

    __slots__ = ("batch", "count", "draws", "first", "total")

    def __init__(self, batch: Any, count: int, first: int, total: int) -> None:
        self.batch, self.count, self.first, self.total = batch, count, first, total
        self.draws = 0


# A captured step finds the tensors in it; what else it holds must be the same to be replayed.
pytree.register_pytree_node(
    Rows,
    lambda rows: ([rows.batch], (rows.count, rows.first, rows.total)),
    lambda members, about: Rows(next(iter(members)), *about),
)


class StepFunction:
    """Calls a function of the user's on a micro-batch; what a loop's `OptimizerStep` takes for the
    forward pass.

    Args:
        loop: the training.
        fn: takes a batch to a loss, to ``(sum, count)``, or to a dict with a "loss" of either kind.
        where: names the call in errors.
    """

    def __init__(self, loop: OwnSteps, fn: Callable[[Any], Any], where: str) -> None:
        self.loop, self.fn, self.where = loop, fn, where
        #: All models of the loop, which are in evaluation mode where a batch counts for nothing.
        self.module: nn.Module = loop.container
        self.last: Rows | None = None
        self._looked = False
        self.rule = _OwnRule(self)

    def __call__(self, rows: Rows) -> tuple[Any, int]:
        """The function's result, and the samples of the micro-batch."""
        batch = self.loop.to_device(rows.batch)
        before, self.loop.rows = self.loop.rows, rows
        rows.draws = 0
        try:
            result = self.fn(batch)
        finally:
            self.loop.rows = before
        if not self._looked:
            self._look(result)
            self._looked = bool(rows.count)
        self.last = rows
        return result, rows.count

    def _look(self, result: Any) -> None:
        """Look at the form of the first result; later ones have the same."""
        loss = loss_in(result, self.where)
        value = loss[0] if isinstance(loss, tuple) else loss
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            what = (
                f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else kind_of(value)
            )
            raise UserError(
                f"{self.where} gave a loss of {what}; return one number, a tensor of shape [], the "
                "mean over the batch (end it with .mean()), or (sum, count)"
            )
        if torch.is_grad_enabled() and not value.requires_grad:
            raise UserError(
                f"{self.where} gave a loss without a gradient; compute it by calling the model, "
                "without torch.no_grad() and .detach()"
            )

    @staticmethod
    def name_of(fn: Any) -> str:
        """What a step function is called in errors."""
        return f"the step function {getattr(fn, '__qualname__', type(fn).__name__)}".replace(
            "<locals>.", ""
        )

    def objective(self, observe: Callable[..., None]) -> Objective:
        """What `BaseLoop.step` takes."""
        return Objective(self, self.rule, lambda rows: rows.count, lambda: observe)


def loss_in(result: Any, where: str) -> Any:
    """The loss in what a step function gave, one number or ``(sum, count)``."""
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise UserError(
                f"{where} gave a dict with {', '.join(map(repr, result)) or 'nothing'}; it must "
                "hold the loss: return {'loss': loss, …}"
            )
        result = result["loss"]
    if result is None:
        raise UserError(f"{where} returned nothing; end it with `return loss`")
    return result


def values_in(result: Any) -> dict[str, Any]:
    """What a step function gave beside its loss."""
    if not isinstance(result, Mapping):
        return {}
    return {name: value for name, value in result.items() if name != "loss"}


class _OwnRule(LossRule):
    """A step function's loss is its own mean over the samples, or says its count."""

    def __init__(self, function: StepFunction) -> None:
        self.function = function
        super().__init__(lambda result, _: loss_in(result, function.where))
        self.look_with(lambda: _Parts(function))


class _Parts(MeanCheck):
    """Compares a step function's value on its first batch with those on two parts of it.

    Models are in evaluation mode meanwhile, so that neither dropout nor BatchNorm makes a
    difference. A function that draws random numbers, calls `Loop.gather`, or takes no part of a
    batch, is not accused.
    """

    def __init__(self, function: StepFunction) -> None:
        super().__init__(lambda output, _: output)
        self.function = function

    def look(self, output: Any, target: Any) -> None:
        """Compare once; `found` is "" where nothing is known against the function."""
        loop, rows = self.function.loop, self.function.last
        if self.found is not None or rows is None:
            return
        self.found = ""
        alone = loop.world.world_size == 1 and loop.settings.accumulate == 1
        # Where the passes are collective, all ranks look or none: with as many samples each.
        uneven = loop.strategy.level and rows.total % loop.strategy.place(loop.world)[1]
        if alone or uneven or rows.count < 2 or loop.has_gathered:
            return
        with (
            contextlib.suppress(Exception),  # it takes no batch of another size
            preserved_generators(),
            evaluation_mode(self.function.module),
        ):
            self.found = self._of_parts(rows)

    def _of_parts(self, rows: Rows) -> str:
        cut = max(1, rows.count // 3)
        sizes = (rows.count, cut, rows.count - cut)
        parts = (rows, _part(rows, 0, cut), _part(rows, cut, rows.count))
        before = generator_states()
        values = []
        for part in parts:
            loss = loss_in(self.function(part)[0], self.function.where)
            if isinstance(loss, tuple):
                return ""
            values.append(float(loss.detach()))
        if have_drawn(before) or self.function.loop.has_gathered:
            return ""
        whole, first, second = values
        mean = (sizes[1] * first + sizes[2] * second) / sizes[0]
        if abs(whole - mean) <= _LIMIT * max(map(abs, values)):
            return ""
        return (
            f"{self.function.where} gave {whole:.6g} for a batch, and {mean:.6g} is the mean of "
            "its values for two parts of it, so that several workers and accumulate would train "
            "another model than one process. Return the mean over the samples, or (sum, count): "
            "the sum of the losses and what it is divided by; compute a loss of the whole global "
            "batch of what loop.gather(…) gives"
        )


def _part(rows: Rows, begin: int, end: int) -> Rows:
    def rows_of(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or len(tensor) != rows.count:
            raise ValueError("no row a sample")
        return tensor[begin:end]

    return Rows(map_tensors(rows.batch, rows_of), end - begin, rows.first + begin, rows.total)
