"""How far rounding alone moves a training: measured where the test runs, since kernels differ by
processor and by compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from allhands import Callback
from allhands.verify.noise import FACTOR
from tests.reference import relative_difference

_RUNS = 3


class Nudge(Callback):
    """Moves each weight by one of its last bits up or down, or not at all, before the first step
    and after each."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def on_train_start(self, training: Any) -> None:
        self._nudge(training.model)

    def on_step_end(self, training: Any) -> None:
        self._nudge(training.model)

    @torch.no_grad()
    def _nudge(self, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            way = torch.randint(-1, 2, parameter.shape, generator=self.generator).to(parameter)
            parameter.copy_(torch.nextafter(parameter, parameter + way))


def rounding_limit(
    train: Callable[[Callback], Mapping[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]
) -> float:
    """The relative difference from `expected` that another rounding of the same training may make.

    Args:
        train: trains once more as for `expected`, with one more callback, and returns what
            `expected` holds: the weights, and whatever else is compared.
        expected: of the training to compare with.
    """
    return FACTOR * max(
        relative_difference(dict(train(Nudge(seed))), dict(expected)) for seed in range(_RUNS)
    )
