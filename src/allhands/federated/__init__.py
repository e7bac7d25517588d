"""Federated training, simulated: any number of clients on any number of devices."""

from __future__ import annotations

import importlib
from typing import Any

# public name -> module that defines it
_LAZY = {
    "Federated": "allhands.federated.strategy",
    "Clients": "allhands.federated.clients",
    "Rounds": "allhands.federated.rounds",
    "Algorithm": "allhands.federated.algorithms",
    "ALGORITHMS": "allhands.federated.algorithms",
    "EXECUTORS": "allhands.federated.executors",
}

__all__ = ["ALGORITHMS", "EXECUTORS", "Algorithm", "Clients", "Federated", "Rounds"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'allhands.federated' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
