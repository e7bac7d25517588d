"""Whether a training's optimizer steps are captured (``step=``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allhands.step import CapturedSteps, cannot_capture

if TYPE_CHECKING:
    from allhands.runner.training import Training


def captures_steps(training: Training, own_batches: bool) -> bool:
    """Whether the steps of a training are to be captured; to be asked before its strategy is bound
    to the model.

    Args:
        training: its settings, world and precision are in place.
        own_batches: the runner's ``handle_batch`` is the user's own.

    Raises:
        UserError: ``step="graph"``, and this training's steps cannot be captured.
    """
    asked = training.settings.step
    if asked == "eager":
        return False
    insist = asked == "graph"
    refusal = _refusal(training, own_batches and not insist)
    if refusal is None:
        return True
    if insist:
        raise cannot_capture(refusal)
    if training.world.device.type == "cuda":
        training.reporter.line(f"step: eager, since {refusal}")
    return False


def captured_steps(training: Training, shows: bool) -> CapturedSteps | None:
    """What takes the steps of a training from CUDA graphs; None where each is asked for anew.

    Args:
        training: its model, strategy and optimizer are in place.
        shows: callbacks run after each step.
    """
    if not training.settings.strategy.captures:
        return None
    return CapturedSteps(
        training.model,
        training.criterion,
        training.optimizer,
        training.world.device,
        keeps=bool(training.settings.metrics),
        shows=shows,
        insist=training.settings.step == "graph",
        say=training.reporter.line,
    )


def _refusal(training: Training, own_batches: bool) -> str | None:
    world, strategy = training.world, training.settings.strategy
    if world.device.type != "cuda":
        return (
            f"the device is '{world.device.type}', and CUDA graphs are what steps are captured in"
        )
    refused = strategy.capture_refused(training.settings.model, world)
    if refused is not None:
        return refused
    if training.settings.activation_checkpointing:
        return (
            "activation_checkpointing keeps the state of the random generators on the host, to "
            "draw the same again"
        )
    if training.precision.scaler is not None:
        return "precision='fp16' looks at its gradients on the host; precision='bf16' does not"
    return (
        "handle_batch is your own, and a replay would not call it (step='graph' captures it all "
        "the same)"
        if own_batches
        else None
    )
