"""Modules in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
