"""Gradients clipped by value."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allhands.checks import is_number
from allhands.errors import UserError, kind_of


class ClipValue:
    """A hook of an optimizer, before its step."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_value_(group["params"], self.value)


def clip_grad_value(optimizer: torch.optim.Optimizer, value: float) -> Any:
    """Bound each number in the gradients, before each step of the optimizer.

    The gradients are those of the whole global batch, or this rank's part of them, so that each
    number is what it is in one process. It is a hook of the optimizer's
    (``register_step_pre_hook``), and refused by name where a strategy takes the steps itself.

    Args:
        optimizer: whose gradients; before ``train()``.
        value: numbers are kept within -`value` and `value`; above 0.

    Returns:
        What has a ``remove()`` that ends it.

    Raises:
        UserError: an argument is none of these.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"clip_grad_value: {kind_of(optimizer)} is no optimizer of torch.optim")
    if not is_number(value) or not value > 0:
        raise UserError(f"clip_grad_value(value={value!r}): the value must be a number above 0")
    return optimizer.register_step_pre_hook(ClipValue(float(value)))
