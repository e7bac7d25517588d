"""Which layers of a training's model are computed again in the backward pass
(``activation_checkpointing=``)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from allhands.errors import UserError
from allhands.step.blocks import blocks, named
from allhands.step.recompute import recomputed

if TYPE_CHECKING:
    from allhands.loop.optimizer_group import OptimizerGroup
    from allhands.loop.settings import LoopSettings


def chosen_layers(model: nn.Module, asked: Any) -> list[str]:
    """The names of the layers of the user's model that are asked for.

    Args:
        model: the whole, under its own names.
        asked: True, or the names of classes or modules.
    """
    if not asked:
        return []
    if asked is not True:
        wanted = [asked] if isinstance(asked, str) else list(asked)
        return [name for name, _ in named(model, wanted, "activation_checkpointing=…")]
    found = [name for name, _ in blocks(model)]
    if not found:
        raise UserError(
            "activation_checkpointing=True is for the members of lists and sequences of layers "
            "that have parts, and the model "
            "has none; write the name of a class of its modules, or a list of names"
        )
    return found


def check_recomputed(settings: LoopSettings) -> None:
    """Raise `UserError` for an `activation_checkpointing` that cannot be honoured, before any
    worker is started."""
    asked = settings.activation_checkpointing
    if not chosen_layers(settings.model, asked):
        return
    refused = settings.strategy.recomputing_refused()
    if refused is not None:
        raise UserError(f"activation_checkpointing={asked!r}: {refused}")


def recomputing(group: OptimizerGroup) -> AbstractContextManager[Any]:
    """A context in which the chosen layers of a group's model are computed again; where ranks hold
    parts of the model, those that are there."""
    chosen = chosen_layers(group.settings.model, group.settings.activation_checkpointing)
    if not chosen:
        return nullcontext()
    return recomputed(group.modules_here(chosen))
