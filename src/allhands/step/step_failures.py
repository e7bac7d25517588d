"""Failures of a step: what they mean, and how all ranks come to stop at the same one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from allhands.comm import all_gather_text, calls
from allhands.errors import UserError
from allhands.step.exchange import Exchange
from allhands.step.loss import NonFiniteLossError
from allhands.world import World


def explain(error: Exception, exchange: Exchange, world: World) -> None:
    """Raise the error that says better than PyTorch's what is wrong with a pass, if there is
    one."""
    better = exchange.explain(error)
    if better is not None:
        raise better from error
    if "more than 1 value per channel" not in str(error):
        return
    where = f" of rank {world.rank}" if world.world_size > 1 else ""
    raise UserError(
        f"BatchNorm cannot train on one sample, the whole batch{where} in this step. When the "
        "last global batch is short, write drop_last=True for this loader or choose a "
        "batch_size that leaves more; or use GroupNorm"
    ) from error


def spoil(parameters: Sequence[nn.Parameter], value: float | None) -> None:
    """Let all gradients be this number, or none; NaN tells the other ranks that this one has
    failed."""
    for parameter in parameters:
        parameter.grad = None if value is None else torch.full_like(parameter, value)


def stop_together(
    failed: NonFiniteLossError | None, parameters: Sequence[nn.Parameter], world: World
) -> None:
    """Raise on all ranks when the loss of one was not finite, before any of them changes its
    weights.

    After the exchange all ranks hold the same gradients, so one number of them tells on all ranks
    alike whether there is anything to ask about. (It may be an overflow under fp16, which is the
    scaler's business.)
    """
    gradient = next((p.grad for p in parameters if p.grad is not None and p.grad.numel()), None)
    if gradient is not None and not math.isfinite(_one_number(gradient)):
        raise_on_all(failed, world)


def raise_on_all(failed: NonFiniteLossError | None, world: World) -> None:
    """Raise on all ranks the error of those that have failed, if there is one."""
    calls.note("asking whose loss is not finite")
    said = all_gather_text("" if failed is None else str(failed), world)
    if failed is not None:
        raise failed
    for text in said:
        if text:
            raise NonFiniteLossError(text)


def _one_number(gradient: torch.Tensor) -> float:
    """A number of a gradient of any memory format: the first one, of a sparse gradient the sum (NaN
    when one is)."""
    return (
        gradient._values().sum() if gradient.is_sparse else gradient[(0,) * gradient.dim()]
    ).item()
