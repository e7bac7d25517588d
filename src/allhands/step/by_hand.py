"""An optimizer step whose backward passes the user calls."""

from __future__ import annotations

import torch

from allhands.step.loss import NonFiniteLossError
from allhands.step.optimizer_step import OptimizerStep
from allhands.step.step_failures import spoil, stop_together


class StepByHand(OptimizerStep):
    """An `OptimizerStep` in parts: `begin`; `backward`, or `add`, as often as this rank has losses;
    and `end`."""

    def begin(self, adds: bool = False, clear: bool = True) -> None:
        """The gradients of the step are added up from here on.

        Args:
            adds: losses are given to `add`, and not to `backward`.
            clear: forget those that lie in the parameters.
        """
        self._adds = adds
        if clear:
            for parameter in self.parameters:
                parameter.grad = None
        self._items, self._failed = 0.0, None
        self.pairs = True
        self._sum: torch.Tensor | None = None  # of the losses that were added
        self._count = 0.0

    def backward(self, loss: torch.Tensor, count: float) -> None:
        """Add the gradients of a loss that is the mean of `count` items. Those of the step are of
        the sum of all losses, each times its count, divided by the sum of all counts over all
        ranks."""
        if self._is_finite(loss, count):
            self._items = self._items + float(count)
            self._run(loss, self.scale * count)

    def add(self, loss: torch.Tensor, count: float, total: float) -> None:
        """Add the gradients of a loss that is the mean of `count` items, of `total` over all ranks.
        Those of the step are of the sum of the losses, each the mean of its `total` items."""
        self.note(loss, count)
        self._run(loss, self.scale * count / total)

    def note(self, loss: torch.Tensor, count: float) -> None:
        """A loss that is the mean of `count` items belongs to the step."""
        if count:
            value = loss.detach()
            self._sum, self._count = value if self._sum is None else self._sum + value, count

    def _run(self, loss: torch.Tensor, factor: float) -> None:
        scaler = self.precision.scaler
        with self.exchange.no_exchange():
            if scaler is None:
                loss.backward(self._weight(factor).to(loss.dtype))
            else:
                scaler.scale(loss * factor).backward()

    def _is_finite(self, loss: torch.Tensor, count: float) -> bool:
        """Report a loss; False where it is not finite, which ends the step on all ranks."""
        try:
            self.observe(loss, count, loss, count, count)
        except NonFiniteLossError as error:
            if not self.several:
                raise
            self._failed = error
            return False
        return True

    def end(self) -> None:
        """Exchange, divide, clip, and take the optimizer's step."""
        if self._sum is not None:
            self._is_finite(self._sum, self._count)
        if self.several:
            if self._failed is not None:
                spoil(self.parameters, float("nan"))
            self.exchange.complete(True, self._failed is not None)
            if self.world.device.type == "cpu":
                stop_together(self._failed, self.parameters, self.world)
        if not self._adds:  # on all ranks, also where this one had no loss
            self._divide(1.0)
        self._update()
