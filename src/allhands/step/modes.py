"""Modules that are otherwise for a while: in evaluation mode, or with another forward function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def forwards_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards each module has the forward function that it has now."""
    before = [(module, "forward" in vars(module), module.forward) for module in modules]
    try:
        yield
    finally:
        for module, own, forward in before:
            if own:
                module.forward = forward
            else:
                vars(module).pop("forward", None)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode; afterwards each submodule is in its own mode
    again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # It may hold modules that it does not name, as a stage of a pipeline does.
        model.train(modes[0][1])
        for module, training in modes:
            module.training = training
