"""An optimizer step whose backward passes the user calls."""

from __future__ import annotations

import torch

from allhands.step.loss import NonFiniteLossError
from allhands.step.optimizer_step import OptimizerStep


class StepByHand(OptimizerStep):
    """An `OptimizerStep` in three parts: `begin`, `backward` as often as this rank has losses, and
    `end`.

    The gradients are those of the sum of all losses, each times its count, divided by the sum of
    all counts over all ranks.
    """

    def begin(self) -> None:
        """The gradients of the step are added up from here on."""
        for parameter in self.parameters:
            parameter.grad = None
        self._items, self._failed = 0.0, None
        self.pairs = True

    def backward(self, loss: torch.Tensor, count: float) -> None:
        """Add the gradients of a loss that is the mean of `count` items."""
        try:
            self.observe(loss, count, loss, count, count)
        except NonFiniteLossError as error:
            if not self.several:
                raise
            self._failed = error
            return
        self._items = self._items + float(count)
        loss = loss * (self.scale * count)
        with self.exchange.no_exchange():
            (
                loss if self.precision.scaler is None else self.precision.scaler.scale(loss)
            ).backward()

    def end(self) -> None:
        """Exchange, divide, clip, and take the optimizer's step."""
        if self.several:
            if self._failed is not None:
                self._spoil(float("nan"))
            self.exchange.complete(True, self._failed is not None)
            if self.world.device.type == "cpu":
                self._stop_together(self._failed)
        self._divide(1.0)
        self._update()
