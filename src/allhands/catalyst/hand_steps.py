"""Backward passes and updates where the script has them, for any number of optimizers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from allhands.errors import UserError
from allhands.loop.loss_mean import LossMean
from allhands.loop.own_steps import OwnSteps
from allhands.step.by_hand import StepByHand


class HandSteps(OwnSteps):
    """A loop whose user calls ``engine.backward(loss)``, ``optimizer.step()`` and
    ``optimizer.zero_grad()``, as in one process: a gradient stays where a backward pass has left
    it, in whichever model, until its optimizer's ``zero_grad()``."""

    instead_of_passes = "write self.engine.backward(loss), self.optimizer.step() and .zero_grad()"

    def __init__(self, *args: Any, **given: Any) -> None:
        # Steps that a backward pass came before, and optimizers whose gradients were used.
        self._open_steps: dict[str, StepByHand] = {}
        self._used_up: set[str] = set()
        super().__init__(*args, **given)

    @property
    def accumulates(self) -> bool:
        """Whether a step is taken after a batch, and not where the script calls it."""
        return self.settings.accumulate > 1 or self.settings.precision != "fp32"

    def add_gradients(self, loss: torch.Tensor) -> None:
        """The backward pass of a loss that is the mean over the samples of the batch."""
        if self.is_accumulating:
            assert self.rows is not None
            self.backward(loss, self.rows.count)
            return
        for name in sorted(self._used_up):
            raise UserError(
                f"engine.backward(loss) after optimizer.step() {_of(name, self.several)}without "
                "optimizer.zero_grad(): the gradient that was used would be used again; call "
                "zero_grad() after step()"
            )
        count, total = self._counted(None)
        self.misuse.agree("engine.backward")
        steps = [self._opened(name) for name in self.groups]
        with self.misuse.within, ExitStack() as stack:
            for group in self.groups.values():
                stack.enter_context(group.exchange.no_exchange())
            for step in steps[1:]:
                step.note(loss, count)
            steps[0].add(loss, count, total)

    def _opened(self, name: str) -> StepByHand:
        step = self._step_by_hand(name, "engine.backward")
        if self._open_steps.get(name) is not step:
            step.begin(adds=True, clear=False)
            self._open_steps[name] = step
        return step

    def take_step(self, name: str) -> None:
        """Exchange the gradients of an optimizer, and update its parameters."""
        if self.is_accumulating:
            return  # it is taken after the batch
        step = self._open_steps.pop(name, None)
        if step is None:
            raise UserError(
                f"optimizer.step() {_of(name, self.several)}before engine.backward(loss); call "
                "engine.backward(loss) first"
            )
        self._end_step(step, name, f"optimizer.step() of '{name}'")
        self._used_up.add(name)

    def clear_gradients(self, name: str) -> None:
        """``optimizer.zero_grad()``."""
        if self.is_accumulating:
            return
        self._used_up.discard(name)
        self.groups[name].optimizer.zero_grad()

    def _observe(
        self, name: str, output: Any, count: int, loss: torch.Tensor, factor: float, items: Any
    ) -> None:
        assert self.measure is not None
        self.measure.observe(output, count, loss, factor, items)

    def _means_of(self, measure: LossMean) -> dict[str, float]:
        values = measure.result() | self.exchange.epoch_values()
        stepped = values.pop("loss")
        means = self.logged.means(taken=values, everywhere=False)
        if "loss" not in means and len(self.groups) == 1:
            means["loss"] = stepped
        return means | values


def _of(name: str, several: bool) -> str:
    return f"of '{name}' " if several else ""
