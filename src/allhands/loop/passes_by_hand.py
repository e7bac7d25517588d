"""Steps of an own loop in which the user calls the backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch

from allhands.comm import all_reduce_sum, calls
from allhands.errors import UserError
from allhands.loop.communication import Communication
from allhands.loop.misuse import Misuse
from allhands.loop.optimizer_group import OptimizerGroup
from allhands.loop.task import Objective
from allhands.step import LossRule, OptimizerStep
from allhands.step.by_hand import StepByHand
from allhands.step.closure import takes_closure


class PassesByHand(Communication):
    """The part of `allhands.Loop` in which the user calls the backward passes."""

    groups: dict[str, OptimizerGroup]
    misuse: Misuse
    # The step of `accumulating`, and by optimizer those that `backward` has begun without it.
    _by_hand: StepByHand | None = None
    _begun: dict[str, StepByHand]
    _steps: dict[tuple[int, str], OptimizerStep]
    _stepped: set[str]
    _group_named: Callable[[str | None], str]
    _observe: Callable[..., None]
    alone: Callable[[OptimizerGroup], AbstractContextManager[None]]
    stepped: Callable[[OptimizerGroup], None]

    @contextmanager
    def accumulating(self, optimizer: str | None = None) -> Iterator[None]:
        """Within, call `backward` for each loss of one optimizer step, as often as this rank has
        losses; on leaving, the step is taken with the gradients of all ranks. To be entered on
        every rank.

        Args:
            optimizer: its name, where there are several.

        Raises:
            UserError: the strategy takes part in the passes (fsdp, kvstore, local_sgd).
        """
        name = self._group_named(optimizer)
        group = self.groups[name]
        take = self._step_by_hand(name, "loop.accumulating")
        self.misuse.agree(f"loop.accumulating of '{name}'")
        with self.alone(group):
            take.begin()
            self._by_hand, self.is_accumulating = take, True
            try:
                with group.precision.autocast():
                    yield
            finally:
                self._by_hand, self.is_accumulating = None, False
            with self.misuse.within:
                take.end()
        self._take(name)

    def backward(
        self, loss: torch.Tensor, count: float | None = None, optimizer: str | None = None
    ) -> None:
        """Add the gradient of a loss to the step that `step` takes, or `accumulating` on its end.

        Args:
            loss: a tensor of shape []; the mean of `count` items.
            count: samples, or whatever the loss is a mean of. None: the samples of the batch of
                this iteration. In `accumulating`, the step's gradient is that of all losses times
                their counts, divided by the counts of all ranks. Before `step`, it is that of the
                sum of the losses, each of them the mean over the counts of all ranks; every rank
                makes the same calls.
            optimizer: its name, where there are several; `accumulating` has been told.

        Raises:
            UserError: no `count` where it is not known; the strategy takes part in the passes; a
                `precision` for which the forward pass has to be in `accumulating`.
        """
        if self._by_hand is not None:
            if count is None:
                raise UserError(
                    "loop.backward(loss) in loop.accumulating: write the number of samples that "
                    "the loss is a mean of, loop.backward(loss, count=len(x))"
                )
            with self.misuse.within:
                self._by_hand.backward(loss, count)
            return
        name = self._group_named(optimizer)
        count, total = self._counted(count)
        self.misuse.agree(f"loop.backward of '{name}'")
        take = self._begun.get(name)
        if take is None:
            take = self._step_by_hand(name, "loop.backward")
            if self.settings.precision != "fp32":
                raise UserError(
                    f"loop.backward with precision='{self.settings.precision}' comes "
                    "after the forward pass; write `with loop.accumulating():` around both, or "
                    "leave precision out and write torch.autocast yourself"
                )
            take.begin(adds=True)
            self._begun[name] = take
        others = [group for other, group in self.groups.items() if other != name]
        with self.misuse.within, ExitStack() as stack:
            for group in others:
                stack.enter_context(group.exchange.no_exchange())
            take.add(loss, count, total)

    def _counted(self, count: float | None) -> tuple[float, float]:
        """Of a loss: what this rank's share of it is a mean of, and that of all ranks."""
        if count is not None:
            total = torch.tensor([float(count)], dtype=torch.float64, device=self.world.device)
            all_reduce_sum([total], self.world)
            return count, float(total)
        if self.batch is None or len(self.batch.parts) != 1:
            raise UserError(
                "loop.backward(loss) does not know what the loss is a mean of; write the number of "
                "samples, loop.backward(loss, count=len(x))"
            )
        return self.batch.count, self.batch.total

    def end_by_hand(self, name: str) -> None:
        """Take the step that `backward` has begun."""
        take = self._begun.pop(name, None)
        if take is None:
            raise UserError(
                "loop.step() takes the step of what loop.backward has added up, and it was not "
                "called; call loop.backward(loss), or loop.step(loss_of, batch)"
            )
        self._end_step(take, name, f"loop.step of '{name}'")

    def _end_step(self, take: StepByHand, name: str, call: str) -> None:
        self.misuse.agree(call)
        with self.misuse.within:
            take.end()
        self._take(name)

    def end_iteration(self) -> None:
        """The body of an iteration is through.

        Raises:
            UserError: the ranks are not at the same place, or a step was begun and not taken.
        """
        self.check_taken()
        self.batch = None
        self.misuse.agree("the end of an iteration")

    def check_taken(self) -> None:
        """Raise `UserError` for a step that was begun and not taken."""
        if self._begun:
            raise UserError(
                "loop.backward was called without loop.step() after it; for a step of several "
                "batches write Loop(accumulate=…) and `with loop.accumulating():`"
            )

    def _take(self, name: str) -> None:
        self._stepped.add(name)
        self.stepped(self.groups[name])

    def _step_by_hand(self, name: str, call: str) -> StepByHand:
        key, group = (0, name), self.groups[name]
        calls.note(("optimizer step", self.global_step + 1))
        if key in self._steps:
            return cast(StepByHand, self._steps[key])
        strategy, what = group.strategy, ""
        exchanges_after = group.exchange.after_backward  # and not in the passes
        if strategy.level or strategy.alone or strategy.takes_step or exchanges_after:
            what = f"strategy '{strategy.name}'"
        if takes_closure(group.optimizer):
            what = type(group.optimizer).__name__
        if what:
            raise UserError(
                f"{call} with {what}, which takes part in the passes; write the loss as a function "
                "and call loop.step"
            )
        if group.captured is not None:
            raise UserError(f"{call} is not captured; write Loop(step='eager')")
        rule = LossRule(_called_by_the_user)
        rule.pairs, rule.check = True, None
        observe = partial(self._observe, name)
        take = group.step_for(Objective(None, rule, lambda _: None, lambda: observe), StepByHand)
        take.before_first_update = None
        self._steps[key] = take
        return cast(StepByHand, take)


def _called_by_the_user(output: Any, target: Any) -> torch.Tensor:
    raise AssertionError("the user calls the criterion")
