"""Whether a training's optimizer steps are captured (``step=``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from allhands.loop.settings import LoopSettings
from allhands.loop.task import Task
from allhands.step import CapturedSteps, cannot_capture
from allhands.world import World

if TYPE_CHECKING:
    from allhands.loop.optimizer_group import OptimizerGroup


def captures_steps(
    settings: LoopSettings, world: World, task: Task, scales: bool, say: Callable[[str], None]
) -> bool:
    """Whether the steps of a training are to be captured; to be asked before its strategy is bound
    to the model.

    Args:
        settings, world, task: of the training.
        scales: losses are scaled, for fp16.
        say: takes a line to print.

    Raises:
        UserError: ``step="graph"``, and this training's steps cannot be captured.
    """
    if settings.step == "eager":
        return False
    insist = settings.step == "graph"
    refusal = _refusal(settings, world, "" if insist else task.own_calls, scales)
    if refusal is None:
        return True
    if insist:
        raise cannot_capture(refusal)
    if world.device.type == "cuda":
        say(f"step: eager, since {refusal}")
    return False


def captured_steps(
    group: OptimizerGroup, task: Task, say: Callable[[str], None]
) -> CapturedSteps | None:
    """What takes the steps of a group from CUDA graphs; None where each is asked for anew."""
    if not group.captures:
        return None
    return CapturedSteps(
        group.model,
        task.criterion,
        group.optimizer,
        group.world.device,
        keeps=task.keeps_outputs,
        shows=task.shows_gradients,
        insist=group.settings.step == "graph",
        say=say,
    )


def _refusal(settings: LoopSettings, world: World, own_calls: str, scales: bool) -> str | None:
    if world.device.type != "cuda":
        return (
            f"the device is '{world.device.type}', and CUDA graphs are what steps are captured in"
        )
    refused = settings.strategy.capture_refused(settings.model, world)
    if refused is not None:
        return refused
    if settings.activation_checkpointing:
        return (
            "activation_checkpointing keeps the state of the random generators on the host, to "
            "draw the same again"
        )
    if scales:
        return "precision='fp16' looks at its gradients on the host; precision='bf16' does not"
    return (
        f"{own_calls}, and a replay would not call it (step='graph' captures it all the same)"
        if own_calls
        else None
    )
