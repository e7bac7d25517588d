"""Whether a training's model is compiled (``step="compile"``), and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from allhands.errors import UserError
from allhands.step.compiled import Compiled

if TYPE_CHECKING:
    from allhands.loop.optimizer_group import OptimizerGroup
    from allhands.loop.settings import LoopSettings


def check_compiled(settings: LoopSettings, workers: int) -> None:
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


def compiling(
    group: OptimizerGroup, losses: Sequence[Any], say: Callable[[str], None]
) -> AbstractContextManager[Any]:
    """A context in which the model of a group is compiled, if that was asked for.

    Args:
        group: bound already.
        losses: criteria; that of a language model is among its longest operations.
        say: takes a line to print.

    Raises:
        UserError: there is no compiler; on leaving: it has failed.
    """
    if group.settings.step != "compile":
        return nullcontext()
    by_layer = group.strategy.compiled(group.world.world_size) == "layers"
    modules = [call for call in losses if isinstance(call, nn.Module)]
    compiled = Compiled(group.model, by_layer, group.world.device, modules)
    say(f"step: {compiled.what} compiled, at the first step of each shape of a batch")
    return compiled
