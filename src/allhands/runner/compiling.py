"""Whether a training's model is compiled (``step="compile"``), and how."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from allhands.errors import UserError
from allhands.step.compiled import Compiled

if TYPE_CHECKING:
    from allhands.runner.settings import TrainSettings
    from allhands.runner.training import Training


def check_compiled(settings: TrainSettings, workers: int) -> None:
    """Raise `UserError` for ``step="compile"`` with a strategy or model that it is not for, before
    any worker is started."""
    if settings.step != "compile":
        return
    if settings.strategy.compiled(workers) is None:
        raise UserError(
            f"step='compile' is not for strategy '{settings.strategy.name}' with {workers} "
            "workers; write step='auto' (it is for single, ddp, kvstore, local_sgd and fsdp)"
        )
    if hasattr(settings.model, "_orig_mod"):
        raise UserError(
            "step='compile': the model is one that torch.compile has given already; pass the model "
            "itself (model._orig_mod), with an optimizer over its parameters"
        )


def compiling(training: Training) -> AbstractContextManager[Any]:
    """A context in which the training's model is compiled, if that was asked for.

    Raises:
        UserError: there is no compiler; on leaving: it has failed.
    """
    if training.settings.step != "compile":
        return nullcontext()
    by_layer = training.settings.strategy.compiled(training.world.world_size) == "layers"
    calls = [training.rules[feed.name].call for feed in training.trained]
    losses = [
        call for call in calls if isinstance(call, nn.Module)
    ]  # that of a language model is among its longest operations
    compiled = Compiled(training.model, by_layer, training.world.device, losses)
    training.reporter.line(
        f"step: {compiled.what} compiled, at the first step of each shape of a batch"
    )
    return compiled
