"""The state of a training by `local_sgd`: the means of all workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from allhands.strategies.model_state import ReplicatedState
from allhands.strategies.own_weights import OwnWeights


class LocalSGDState(ReplicatedState):
    """What is evaluated and saved is the mean of the workers' weights and optimizer states."""

    def __init__(self, own: OwnWeights) -> None:
        super().__init__(own.model, own.optimizer, own.world)
        self._own = own

    def collect(self) -> None:
        self._own.settle_all()

    def sync_buffers(self) -> None:
        self._own.settle()
        super().sync_buffers()

    @contextmanager
    def buffers_made_equal(self) -> Iterator[dict[str, torch.Tensor]]:
        with self._own.settled(), super().buffers_made_equal() as buffers:
            yield buffers
