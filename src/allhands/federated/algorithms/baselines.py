"""What federated algorithms are compared with: no sharing at all, and no clients at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn

from allhands.federated.algorithms.base import Algorithm, Server, Trained
from allhands.federated.algorithms.fedavg import FedAvg
from allhands.federated.clients import Clients
from allhands.federated.local_training import LocalTraining
from allhands.federated.sums import Sums


class LocalOnly(Algorithm):
    """Every client trains a model of its own, from the same beginning, and nothing is shared; the
    global model stays as it was.

    Each client goes on from its own model whenever it is in the cohort; its optimizer begins anew,
    as under every algorithm.
    """

    name = "local_only"
    shares = False

    def keeps(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters()] + [
            name for name, _ in model.named_buffers()
        ]

    def vectors(self, server: Server) -> dict[str, int]:
        return {}

    def contribute(self, trained: Trained, server: Server, sums: Sums) -> None:
        """Nothing."""

    def aggregate(self, server: Server, sums: Sums) -> None:
        """Nothing."""


class Centralised(FedAvg):
    """One client holds the data of all, and sees as many samples in a round as a cohort of
    `per_round` clients would on average, in batches of the same size.

    When all clients take part and train by epochs, a round is as many epochs over all data.
    Elsewhere it is a number of steps, rounded, each round over a new order of the data. With full
    batches (`batch_size` None) a round of `per_round` of the clients has batches of that share of
    the data. Optimizer state begins anew in every round, as a client's does.
    """

    name = "centralised"

    def __init__(self) -> None:
        super().__init__()

    def prepare(
        self, clients: Clients, local: LocalTraining, per_round: int
    ) -> tuple[Clients, LocalTraining, int]:
        pooled = Clients([clients.indices])
        samples, share = len(pooled.indices), per_round / len(clients)
        if local.batch_size is None:
            return (
                pooled,
                replace(
                    local,
                    batch_size=max(1, round(samples * share)),
                    steps=local.steps or local.epochs,
                ),
                1,
            )
        if share == 1 and local.steps is None:
            return pooled, local, 1
        sizes, counts = np.unique(clients.sizes, return_counts=True)
        seen = sum(
            int(count) * local.num_seen(int(size))
            for size, count in zip(sizes, counts, strict=True)
        )
        return (
            pooled,
            replace(local, steps=max(1, round(share * seen / min(local.batch_size, samples)))),
            1,
        )
