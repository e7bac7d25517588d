"""Steps of an own loop in which the user calls the backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from allhands.errors import UserError
from allhands.loop.task import Objective
from allhands.step import LossRule
from allhands.step.by_hand import StepByHand
from allhands.step.closure import takes_closure

if TYPE_CHECKING:
    from allhands.loop.loop import Loop
    from allhands.loop.optimizer_group import OptimizerGroup


@contextmanager
def step_by_hand(loop: Loop, group: OptimizerGroup, observe: Any) -> Iterator[StepByHand]:
    """Within, backward passes add up; on leaving, the optimizer takes its step.

    Raises:
        UserError: the strategy or the optimizer cannot.
    """
    strategy = group.strategy
    if strategy.level or strategy.alone or strategy.takes_step or takes_closure(group.optimizer):
        what = (
            type(group.optimizer).__name__
            if takes_closure(group.optimizer)
            else f"strategy '{strategy.name}'"
        )
        raise UserError(
            f"loop.accumulating with {what}, which takes part in the passes; write the loss as a "
            "function and call loop.step"
        )
    if group.captured is not None:
        raise UserError("loop.accumulating is not captured; write Loop(step='eager')")
    rule = LossRule(_called_by_the_user)
    rule.pairs, rule.check = True, None
    take = group.step_for(Objective(None, rule, lambda _: None, lambda: observe), StepByHand)
    assert isinstance(take, StepByHand)
    take.before_first_update = None
    with loop.alone(group):
        take.begin()
        yield take
        with loop.misuse.within:
            take.end()


def _called_by_the_user(output: Any, target: Any) -> torch.Tensor:
    raise AssertionError("the user calls the criterion")
