"""Whether a training's optimizer steps are recorded (``step=``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allhands.step import RecordedSteps, cannot_record

if TYPE_CHECKING:
    from allhands.runner.training import Training

_STRATEGIES = ("single", "ddp")


def recorded_steps(training: Training, own_batches: bool, shows: bool) -> RecordedSteps | None:
    """What takes the steps of a training from records; None where each is asked for anew.

    Args:
        training: its model, strategy and optimizer are in place.
        own_batches: the runner's ``handle_batch`` is the user's own.
        shows: callbacks run after each step.

    Raises:
        UserError: ``step="graph"``, and this training's steps cannot be recorded.
    """
    asked = training.settings.step
    if asked == "eager":
        return None
    insist = asked == "graph"
    refusal = _refusal(training, own_batches and not insist)
    if refusal is not None:
        if insist:
            raise cannot_record(refusal)
        if training.world.device.type == "cuda":
            training.reporter.line(f"step: eager, since {refusal}")
        return None
    return RecordedSteps(
        training.model, training.criterion, training.optimizer, training.world.device,
        keeps=bool(training.settings.metrics), shows=shows, insist=insist, say=training.reporter.line,
    )  # fmt: skip


def _refusal(training: Training, own_batches: bool) -> str | None:
    world, strategy = training.world, training.settings.strategy
    if world.device.type != "cuda":
        return f"the device is '{world.device.type}', and CUDA graphs are what steps are recorded in"
    if strategy.name not in _STRATEGIES:
        return f"strategy '{strategy.name}' is not among those whose steps are recorded ({', '.join(_STRATEGIES)})"
    if world.world_size > 1:
        return f"there are {world.world_size} workers, and the exchange between workers is not recorded"
    if training.precision.scaler is not None:
        return "precision='fp16' looks at its gradients on the host; precision='bf16' does not"
    return (
        "handle_batch is your own, and a replay would not call it (step='graph' records it all the same)" if own_batches else None
    )
