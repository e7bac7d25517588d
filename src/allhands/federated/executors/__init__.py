"""How the clients of one device are trained: one after another, in a CUDA graph, or many at
once."""

from __future__ import annotations

from allhands.federated.executors.base import ClientError, CohortMember, Executor, ExecutorContext
from allhands.federated.executors.choice import EXECUTORS, Auto
from allhands.federated.executors.graph import Graph
from allhands.federated.executors.serial import Serial
from allhands.federated.executors.stacked import Stacked

__all__ = [
    "EXECUTORS",
    "Auto",
    "ClientError",
    "CohortMember",
    "Executor",
    "ExecutorContext",
    "Graph",
    "Serial",
    "Stacked",
]
