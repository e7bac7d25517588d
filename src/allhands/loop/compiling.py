"""Whether a training's model is compiled, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from allhands.errors import UserError
from allhands.loop.joining import in_elastic_job
from allhands.step.blocks import blocks
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
    refusal = settings.strategy.compile_refused(workers)
    only_layers = refusal is None and settings.strategy.compiled(workers) == "only layers"
    if only_layers and not blocks(settings.model):
        refusal = "of a pipeline the layers in a list are compiled, and the model has none"
    if refusal is not None:
        raise UserError(f"step='compile': {refusal}; write step='auto'")
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
    refused = group.strategy.compile_refused(world.world_size) is not None
    # In an elastic job a worker that joins knows nothing of what the others have tried.
    tries = asked == "auto" and not (refused or in_elastic_job()) and captured is not None
    tries = tries and left is not None
    if asked != "compile" and not tries:
        return nullcontext()
    kind = group.strategy.compiled(world.world_size)
    layers: list[nn.Module] = []
    if kind != "model":
        names = (name for name, _ in blocks(group.settings.model))
        layers = [module for _, module in group.modules_here(names)]
    whole = [] if layers or kind == "only layers" else [group.model]
    criteria = [call for call in losses if isinstance(call, nn.Module)]

    def compiled(lenient: bool = False) -> Compiled:
        return Compiled([*layers, *whole, *criteria], world.device, lenient)

    if asked == "compile":
        made = compiled()
        what = ["the whole model"] if whole else [f"its {len(layers)} layers"]
        what += ["the loss"] if criteria else []
        say(f"step: {' and '.join(what)} compiled, at the first step of each shape of a batch")
        return made
    assert captured is not None
    assert left is not None
    able = compiler_missing(world.device) is None and not hasattr(group.settings.model, "_orig_mod")
    count = sum(bool(module._parameters) for module in group.model.modules())
    choice = CompileChoice(lambda: compiled(lenient=True), count, left, world, say, able)
    captured.choice = choice
    return choice
