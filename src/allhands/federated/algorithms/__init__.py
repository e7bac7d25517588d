"""Federated algorithms, one class each, named as in their papers."""

from __future__ import annotations

from allhands.federated.algorithms.base import Algorithm, Server, Trained
from allhands.federated.algorithms.baselines import Centralised, LocalOnly
from allhands.federated.algorithms.fedavg import FedAvg
from allhands.federated.algorithms.fedbn import FedBN
from allhands.federated.algorithms.fedbuff import FedBuff
from allhands.federated.algorithms.fednova import FedNova
from allhands.federated.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi
from allhands.federated.algorithms.fedprox import FedProx
from allhands.federated.algorithms.qfedavg import QFedAvg
from allhands.federated.algorithms.robust import Krum, Median, TrimmedMean
from allhands.federated.algorithms.scaffold import Scaffold

ALGORITHMS: dict[str, type[Algorithm]] = {
    cls.name: cls
    for cls in (
        FedAvg,
        FedProx,
        FedAvgM,
        FedAdagrad,
        FedYogi,
        FedAdam,
        FedOpt,
        Scaffold,
        FedNova,
        FedBN,
        QFedAvg,
        Median,
        TrimmedMean,
        Krum,
        FedBuff,
        LocalOnly,
        Centralised,
    )
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Centralised",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedBuff",
    "FedNova",
    "FedOpt",
    "FedProx",
    "FedYogi",
    "Krum",
    "LocalOnly",
    "Median",
    "QFedAvg",
    "Scaffold",
    "Server",
    "Trained",
    "TrimmedMean",
]
