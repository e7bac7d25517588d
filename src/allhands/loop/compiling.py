"""Whether a training's model is compiled, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from allhands.errors import UserError
from allhands.step.compile_choice import CompileChoice
from allhands.step.compiled import Compiled, compiler_missing

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
    group: OptimizerGroup,
    losses: Sequence[Any],
    say: Callable[[str], None],
    left: Callable[[], int | None] | None = None,
) -> AbstractContextManager[Any]:
    """A context in which the model of a group is compiled, if that was asked for, or if it turns
    out to pay.

    Args:
        group: bound already.
        losses: criteria; that of a language model is among its longest operations.
        say: takes a line to print.
        left: the optimizer steps that are left; without it, what was not asked for is not tried.

    Raises:
        UserError: there is no compiler; on leaving: it has failed.
    """
    asked, world, captured = group.settings.step, group.world, group.captured
    kind = group.strategy.compiled(world.world_size)
    modules = [call for call in losses if isinstance(call, nn.Module)]

    def compiled(lenient: bool = False) -> Compiled:
        return Compiled(group.model, kind == "layers", world.device, modules, lenient)

    if asked == "compile":
        made = compiled()
        say(f"step: {made.what} compiled, at the first step of each shape of a batch")
        return made
    if asked != "auto" or kind is None or captured is None or left is None:
        return nullcontext()
    able = compiler_missing(world.device) is None and not hasattr(group.settings.model, "_orig_mod")
    layers = sum(bool(module._parameters) for module in group.model.modules())
    choice = CompileChoice(lambda: compiled(lenient=True), layers, left, world, say, able)
    captured.choice = choice
    return choice
