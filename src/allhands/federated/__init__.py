"""Federated training, simulated: any number of clients on any number of devices."""

from __future__ import annotations

import importlib
from typing import Any

from allhands.errors import refuse_name

# By the module that defines them, the public names; those below `coala` are COALA's.
_NAMES = {
    "allhands.federated.algorithms": "ALGORITHMS Algorithm",
    "allhands.federated.clients": "Clients",
    "allhands.federated.coala.api": "init init_dataset init_model register_client "
    "register_dataset register_model register_server run",
    "allhands.federated.coala.client": "BaseClient",
    "allhands.federated.coala.config": "load_config",
    "allhands.federated.coala.datasets": "FederatedDataset FederatedTensorDataset "
    "FederatedTorchDataset",
    "allhands.federated.coala.server": "BaseServer",
    "allhands.federated.executors": "EXECUTORS",
    "allhands.federated.rounds": "Rounds",
    "allhands.federated.strategy": "Federated",
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}
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
