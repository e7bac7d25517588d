"""What callbacks measure of a loader, by the keys of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from allhands.loop.loss_mean import LossMean
from allhands.runner.metrics import LoaderMetrics
from allhands.world import World


class LoaderMeans(LossMean):
    """The loss of one loader, and the metrics of callbacks, each of an output and a target of its
    own.

    Args:
        callbacks: have ``metrics``, by name.
        world, trains, counts: see `LossMean`.
    """

    def __init__(
        self, callbacks: Iterable[Any], world: World, trains: bool, counts: bool = True
    ) -> None:
        self._zero = torch.zeros((), device=world.device)
        self._callbacks = list(callbacks)
        self._own = [LoaderMetrics(one.metrics, world, False, counts) for one in self._callbacks]
        super().__init__(world, trains, counts)

    def start(self, where: str) -> None:
        super().start(where)
        for own in self._own:
            own.start(where)

    def observe_for(self, callback: Any, output: torch.Tensor, target: torch.Tensor) -> None:
        own = next(
            own for own, one in zip(self._own, self._callbacks, strict=True) if one is callback
        )
        own.observe(output, target, self._zero, 1.0, 1)

    def partial(self) -> dict[str, torch.Tensor]:
        parts = super().partial()
        for number, own in enumerate(self._own):
            parts |= {f"{number}/{name}": value for name, value in own.partial().items()}
        return parts

    def take_up(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        super().take_up(parts)
        for number, own in enumerate(self._own):
            prefix = f"{number}/"
            own.take_up(
                [
                    {
                        name.removeprefix(prefix): value
                        for name, value in part.items()
                        if name.startswith(prefix)
                    }
                    for part in parts
                ]
            )

    def _computed(self, some_empty: bool) -> dict[str, float]:
        return self.of_callbacks()

    def of_callbacks(self) -> dict[str, float]:
        """The metrics over all samples of all ranks, which all call it."""
        values: dict[str, float] = {}
        for own in self._own:
            found = own.result()
            del found["loss"]
            values |= found
        return values
