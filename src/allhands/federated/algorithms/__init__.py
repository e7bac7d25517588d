"""Federated algorithms, one class each, named as in their papers."""

from __future__ import annotations

from allhands.federated.algorithms.base import Algorithm, Server, Trained
from allhands.federated.algorithms.fedavg import FedAvg

ALGORITHMS: dict[str, type[Algorithm]] = {cls.name: cls for cls in (FedAvg,)}

__all__ = ["ALGORITHMS", "Algorithm", "FedAvg", "Server", "Trained"]
