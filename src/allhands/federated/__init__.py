"""Federated training, simulated: any number of clients on any number of devices."""

from __future__ import annotations

import importlib
from typing import Any

from allhands.errors import refuse_name

# public name -> module that defines it
_LAZY = {
    "Federated": "allhands.federated.strategy",
    "Clients": "allhands.federated.clients",
    "Rounds": "allhands.federated.rounds",
    "Algorithm": "allhands.federated.algorithms",
    "ALGORITHMS": "allhands.federated.algorithms",
    "EXECUTORS": "allhands.federated.executors",
    # COALA's
    "init": "allhands.federated.coala.api",
    "run": "allhands.federated.coala.api",
    "init_dataset": "allhands.federated.coala.api",
    "init_model": "allhands.federated.coala.api",
    "load_config": "allhands.federated.coala.config",
    "register_dataset": "allhands.federated.coala.api",
    "register_model": "allhands.federated.coala.api",
    "register_server": "allhands.federated.coala.api",
    "register_client": "allhands.federated.coala.api",
    "BaseServer": "allhands.federated.coala.server",
    "BaseClient": "allhands.federated.coala.client",
    "FederatedDataset": "allhands.federated.coala.datasets",
    "FederatedTensorDataset": "allhands.federated.coala.datasets",
    "FederatedTorchDataset": "allhands.federated.coala.datasets",
}
_MODULES = {"slurm": "allhands.world.slurm"}

__all__ = [
    "ALGORITHMS",
    "EXECUTORS",
    "Algorithm",
    "BaseClient",
    "BaseServer",
    "Clients",
    "Federated",
    "FederatedDataset",
    "FederatedTensorDataset",
    "FederatedTorchDataset",
    "Rounds",
    "init",
    "init_dataset",
    "init_model",
    "load_config",
    "register_client",
    "register_dataset",
    "register_model",
    "register_server",
    "run",
    "slurm",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    instead = importlib.import_module("allhands.federated.coala.instead").INSTEAD
    return refuse_name(__name__, name, instead)


def __dir__() -> list[str]:
    return sorted(__all__)
