"""The trainings that this process runs, for `evaluate` and `predict` in their hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from allhands.errors import UserError

if TYPE_CHECKING:
    from allhands.runner.training import Training

_running: list[Training] = []  # a hook may train another model


@contextmanager
def running(training: Training) -> Iterator[None]:
    """Within, `in_training` finds the training."""
    _running.append(training)
    try:
        yield
    finally:
        _running.remove(training)


def in_training(model: nn.Module) -> tuple[nn.Module, Training | None]:
    """The module to call for `model`, and the running training that has weights of it, if there is
    one.

    The user's own model stands for ``training.model``, as a strategy may train parts of a copy.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    for training in reversed(_running):
        own, plain = training.model, training.settings.model
        if model is own or model is plain:
            return own, training
        if any(id(parameter) in parameters for parameter in own.parameters()):
            return model, training
        if any(
            id(parameter) in parameters
            for parameter in plain.parameters()
            if parameter.requires_grad
        ):
            raise UserError(
                "the model that was given holds the one in training, and strategy "
                f"'{training.loop.strategy.name}' trains "
                "that in parts, in another module. Pass training.model, or write distributed='ddp'"
            )
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise UserError(
            "the model's weights lie in parts on the ranks, and it is not the model of a training "
            "that runs now. Within a training pass training.model, whose weights a callback may "
            "change in on_evaluate_start; after it, the model that was given to train()"
        )
    return model, None
