"""The clients as objects of a registered class: made when they are first asked for, each trained in
one process only."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import nn

from allhands.data import derive_seed, preserved_generators, seed_everything
from allhands.errors import AllhandsError
from allhands.federated.algorithms import Server, Trained
from allhands.federated.coala.client import BaseClient
from allhands.federated.coala.config_sections import ClientConfig
from allhands.federated.coala.datasets import FederatedDataset
from allhands.federated.executors import ClientError, CohortMember, Executor, ExecutorContext
from allhands.federated.executors.base import Sink, States


class Pool(Sequence[BaseClient]):
    """All clients in order; an object is made when it is first asked for, and kept."""

    def __init__(
        self,
        kind: type[BaseClient],
        conf: ClientConfig,
        train: FederatedDataset,
        test: FederatedDataset | None,
        device: torch.device,
    ) -> None:
        assert train.clients is not None
        self.kind, self.conf, self.train, self.test, self.device = kind, conf, train, test, device
        self.clients = train.clients
        self._made: dict[int, BaseClient] = {}

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, index: int) -> BaseClient: ...
    @overload
    def __getitem__(self, index: slice) -> list[BaseClient]: ...
    def __getitem__(self, index: int | slice) -> BaseClient | list[BaseClient]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        if number not in self._made:
            made = self.kind(
                self.clients.name(number),
                self.conf,
                self.train,
                self.test,
                self.device,
                sleep_time=0,
            )
            made.number = number
            self._made[number] = made
        return self._made[number]


class Objects(Executor):
    """Trains each client by its own object's `run_train`: any code. The model that they share is
    written anew for each."""

    name = "objects"

    def __init__(self, work: ExecutorContext, server: Server, pool: Pool) -> None:
        super().__init__(work, server)
        self.pool = pool
        self.model = work.model.to(server.device)

    def train(self, jobs: Sequence[CohortMember], states: States, sink: Sink) -> None:
        for job in jobs:
            began, client = time.perf_counter(), self.pool[job.client]
            client.round, client.seed = self.server.round, self.work.seed
            start = self.server.start(states([job.client]))
            self.load(start)
            try:
                with preserved_generators():
                    seed_everything(
                        derive_seed(self.work.seed, "noise", self.server.round, job.client)
                    )
                    learnt = client.run_train(self.model, self.pool.conf)
                trained = self._trained(job, client, learnt, start)
            except AllhandsError:
                raise
            except Exception as error:
                raise ClientError(
                    job, f"client {client.cid}: {type(error).__name__}: {error}"
                ) from error
            sink(trained, time.perf_counter() - began)

    def load(self, row: torch.Tensor) -> nn.Module:
        """The shared model with the weights of a row, and the server's integer buffers."""
        self.server.layout.write(row.reshape(-1), self.model)
        self.server.layout.write_integers(self.server.integers, self.model)
        return self.model

    def _trained(
        self, job: CohortMember, client: BaseClient, learnt: Any, start: torch.Tensor
    ) -> Trained:
        layout, size = self.server.layout, self.work.clients.size(job.client)
        if not isinstance(learnt, nn.Module):
            raise TypeError(
                f"run_train returned a {type(learnt).__name__}; it must return the model"
            )
        losses = client.train_loss
        return Trained(
            clients=[job.client],
            slots=[job.slot],
            rows=layout.read(learnt)[None].to(self.server.device),
            start=start,
            samples=torch.tensor([float(size)], dtype=torch.float64),
            steps=torch.tensor([float(self.work.local.num_steps(size))], dtype=torch.float64),
            loss=torch.tensor(
                [sum(losses) / len(losses) if losses else float("nan")], dtype=torch.float64
            ),
            integers=layout.read_integers(learnt)[None] if layout.integers else None,
        )


def fresh(model: nn.Module, server: Server) -> nn.Module:
    """A copy of a model with the server's weights and buffers."""
    made = copy.deepcopy(model)
    server.layout.write(server.weights, made)
    server.layout.write_integers(server.integers, made)
    return made
