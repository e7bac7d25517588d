"""How the clients of one device are trained: one after another, in a CUDA graph, or many at once."""

from __future__ import annotations

from allhands.federated.executors.base import ClientError, Executor, Job, Work
from allhands.federated.executors.serial import Serial

EXECUTORS: dict[str, type[Executor]] = {cls.name: cls for cls in (Serial,)}

__all__ = ["EXECUTORS", "ClientError", "Executor", "Job", "Serial", "Work"]
