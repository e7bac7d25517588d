"""Whether a training's optimizer steps are captured (``step=``)."""

from __future__ import annotations

from collections.abc import Callable

from allhands.loop.joining import in_elastic_job
from allhands.loop.settings import LoopSettings
from allhands.loop.task import Task
from allhands.step import cannot_capture
from allhands.world import World


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


def _refusal(settings: LoopSettings, world: World, own_calls: str, scales: bool) -> str | None:
    if world.device.type != "cuda":
        return (
            f"the device is '{world.device.type}', and CUDA graphs are what steps are captured in"
        )
    if in_elastic_job() and settings.strategy.replicas(world.world_size) is not None:
        return (
            f"with --elastic one process may take the steps of several workers of "
            f"'{settings.strategy.name}', one after another"
        )
    refused = settings.strategy.capture_refused(settings.model, world)
    if refused is not None:
        return refused
    if scales:
        return "precision='fp16' looks at its gradients on the host; precision='bf16' does not"
    return (
        f"{own_calls}, and a replay would not call it (step='graph' captures it all the same)"
        if own_calls
        else None
    )
