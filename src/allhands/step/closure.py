"""Optimizers whose step takes a closure, which computes the loss and its gradients again (LBFGS,
SAM)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from allhands.comm import all_reduce_sum
from allhands.step.optimizer_step import OptimizerStep


def takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer computes the loss again within a step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return isinstance(optimizer, torch.optim.LBFGS) or (
        closure is not None and closure.default is closure.empty
    )


class ClosureStep(OptimizerStep):
    """An `OptimizerStep` whose optimizer is given a closure.

    The gradients of the global batch lie in the parameters when the optimizer's step is called, as
    after a backward pass by hand. The closure computes them again, with the exchange, and returns
    the loss of the global batch, the same number on all ranks, so that all of them take the same
    decisions. Called before the weights have changed, it computes nothing. What is reported is the
    loss with which the step began.
    """

    _again = False

    def __call__(
        self, batches: Sequence[Any], counts: Sequence[int], total: int, idle: bool
    ) -> None:
        self._given = batches, counts, total, idle
        self._compute()

    def _compute(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        self.compute(*self._given)

    def _observe(
        self, output: Any, target: Any, loss: torch.Tensor, factor: float, count: Any
    ) -> None:
        if self.counts_here:
            self._sums[0] += loss.detach() * factor
            self._sums[1] += count
        if not self._again:
            super()._observe(output, target, loss, factor, count)

    def _update(self) -> None:
        if self._again:
            return
        value = self._value()
        before: torch.Tensor | None = self._marks()

        def closure() -> torch.Tensor:
            nonlocal value, before
            if before is None or not torch.equal(before, self._marks()):
                before = None
                with torch.enable_grad():
                    self._compute()
                value = self._value()
            return value

        self._again = True
        try:
            with self.label("optimizer"):
                self.optimizer.step(closure)  # type: ignore[arg-type]
        finally:
            self._again = False
        if self.several:
            self.exchange.updated()

    def _value(self) -> torch.Tensor:
        """The loss of the global batch."""
        all_reduce_sum([self._sums], self.world)
        total, items = self._sums
        return (total if self.rule.sums else total / items.clamp_min(1e-30)).to(self._weight.dtype)

    def _marks(self) -> torch.Tensor:
        """Numbers that change with the weights, also where these were changed past autograd
        (``p.data``)."""
        return torch.stack([parameter.detach().double().norm() for parameter in self.parameters])
