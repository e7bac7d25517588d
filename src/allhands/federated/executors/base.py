"""What an executor does: train given clients on one device and hand their models over, row by
row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from allhands.federated.algorithms.base import Algorithm, Server, Trained
from allhands.federated.clients import Clients
from allhands.federated.local_training import LocalTraining
from allhands.federated.samples import Samples


@dataclass(frozen=True)
class CohortMember:
    """One client of the cohort: its number among all clients, and its place in the cohort."""

    client: int
    slot: int


#: Gives the algorithm's state of clients, shape ``[clients, …]`` by name; on the executor's device.
States = Callable[[Sequence[int]], dict[str, torch.Tensor]]
#: Takes clients that have trained, with the seconds that each took; the rows are overwritten
#: afterwards.
Sink = Callable[[Trained, float], None]


@dataclass
class ExecutorContext:
    """What an executor is made for: everything that does not change between rounds.

    `model` is the executor's own to bind and change.
    """

    model: nn.Module
    local: LocalTraining
    algorithm: Algorithm
    samples: Samples
    clients: Clients
    seed: int


class Executor(ABC):
    """Trains clients on one device. All executors give the same models, up to rounding."""

    #: The name by which it is chosen.
    name: str
    #: Whether many clients at once are faster than one after another, so that a few large parts of
    #: a cohort are better than many.
    together: bool = False

    def __init__(self, work: ExecutorContext, server: Server) -> None:
        self.work = work
        self.server = server

    @classmethod
    def refuses(cls, work: ExecutorContext, server: Server) -> str | None:
        """Why it cannot train these clients, as the end of a sentence; None when it can."""
        return None

    @abstractmethod
    def train(self, jobs: Sequence[CohortMember], states: States, sink: Sink) -> None:
        """Train each client from `server.weights`, in any order; each is handed to `sink` once.

        Raises:
            ClientError: a client's own code or data failed; it names the client.
        """


class ClientError(RuntimeError):
    """A client failed. `job` is who; the cause is chained."""

    def __init__(self, job: CohortMember, message: str) -> None:
        super().__init__(message)
        self.job = job


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was asked to; a processor already has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
