"""The state of a training by `local_sgd`: the means of all workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from allhands.strategies.local_sgd_replicas import LocalReplicas
from allhands.strategies.model_state import ReplicatedState
from allhands.strategies.own_weights import OwnWeights


class LocalSGDState(ReplicatedState):
    """What is evaluated and saved is the mean of the workers' weights and optimizer states."""

    def __init__(self, own: OwnWeights, replicas: LocalReplicas | None) -> None:
        super().__init__(own.model, own.optimizer, own.world)
        self._own, self._replicas, self._for_a_moment = own, replicas, False

    def collect(self) -> None:
        self._own.settle_all()

    def sync_buffers(self) -> None:
        self._own.settle()
        replicas = self._replicas
        if replicas is not None:
            replicas.mean_of_statistics()
        super().sync_buffers()
        if replicas is not None and not self._for_a_moment:
            replicas.synced()

    @contextmanager
    def buffers_made_equal(self) -> Iterator[dict[str, torch.Tensor]]:
        self._for_a_moment = True
        try:
            with self._own.settled(), super().buffers_made_equal() as buffers:
                yield buffers
        finally:
            self._for_a_moment = False
