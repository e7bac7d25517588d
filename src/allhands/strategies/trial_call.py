"""A measurement on what the runner calls the model with, before the training begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from allhands.errors import UserError
from allhands.strategies.base import TryOn


def on_training_data(
    try_on: TryOn, pieces: int, measure: Callable[..., Any], device: torch.device
) -> Any:
    """What ``measure(*args, **kwargs)`` gives, where the runner calls the model with these
    arguments on the first samples.

    It runs in the training's precision; random draws are put back.

    Args:
        try_on: see `allhands.strategies.base.BindOptions`.
        pieces: micro-batches of a batch.
        measure: called once.
        device: whose draws are put back.
    """

    class Trial(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise _Measurement(measure(*args, **kwargs))

    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try_on(Trial(), pieces)
    except _Measurement as found:
        return found.result
    raise UserError("handle_batch did not call the model that it is given. Call model(…) itself")


def wait_for(device: torch.device) -> None:
    """Until what was asked of a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Measurement(BaseException):
    """Carries the result out of handle_batch; past a user's ``except Exception``."""

    def __init__(self, result: Any) -> None:
        self.result = result
