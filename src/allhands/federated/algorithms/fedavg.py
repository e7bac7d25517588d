"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017."""

from __future__ import annotations

import torch

from allhands.federated.algorithms.base import Algorithm, Server, Trained
from allhands.federated.sums import Sums


class FedAvg(Algorithm):
    """The new model is the mean of the cohort's models.

    Args:
        weighted: by samples, as in the paper's algorithm 1; False: every client counts the same.
    """

    name = "fedavg"

    def __init__(self, weighted: bool = True) -> None:
        self.weighted = weighted

    def weights(self, trained: Trained) -> torch.Tensor:
        return trained.samples if self.weighted else torch.ones_like(trained.samples)

    def aggregate(self, server: Server, sums: Sums) -> None:
        server.weights.add_(sums.mean("update"))
