"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020."""

from __future__ import annotations

import torch

from allhands.federated.algorithms.base import fraction
from allhands.federated.algorithms.fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg whose clients add ``mu / 2 * ||w - start||^2`` to their loss (algorithm 2 of the
    paper, with every client doing all of its work).

    Args:
        mu: weight of the term, at least 0; 0 is FedAvg, bit for bit.
        weighted: see `FedAvg`.
    """

    name = "fedprox"

    def __init__(self, mu: float = 0.01, weighted: bool = True) -> None:
        super().__init__(weighted)
        self.mu = fraction("mu", mu)
        self.corrects = self.mu > 0

    def correct(
        self,
        gradients: torch.Tensor,
        weights: torch.Tensor,
        start: torch.Tensor,
        own: dict[str, torch.Tensor],
    ) -> None:
        gradients.add_(weights - start, alpha=self.mu)
