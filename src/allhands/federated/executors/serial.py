"""One client after another, in one model whose weights are copied in place."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from allhands.comm.clipping import clip_rows
from allhands.data import derive_seed, preserved_generators
from allhands.federated.algorithms.base import START_GRADIENT, Server, Trained
from allhands.federated.executors.base import (
    ClientError,
    CohortMember,
    Executor,
    ExecutorContext,
    Sink,
    States,
)
from allhands.federated.executors.gathering import Gathered
from allhands.federated.executors.starting import measuring
from allhands.federated.keyed_noise import KeyedNoise
from allhands.federated.local_training import restart
from allhands.step import LossRule, Precision


class Serial(Executor):
    """Any model, any loss, any optimizer, on any device.

    The model's weights are views into one row, and its gradients into another: a client costs one
    copy, no allocation.
    """

    name = "serial"

    def __init__(self, work: ExecutorContext, server: Server) -> None:
        super().__init__(work, server)
        layout = server.layout
        self.rows = torch.zeros(1, layout.length, dtype=layout.dtype, device=server.device)
        self.gradients = torch.zeros(1, layout.trained, dtype=layout.dtype, device=server.device)
        work.model.to(server.device)
        self.noise = KeyedNoise(work.model, server.device)
        layout.bind(work.model, self.rows[0], self.gradients[0])
        self.rule = LossRule(work.local.criterion)
        self.precision = Precision(work.local.precision, server.device)
        self._room: torch.Tensor | None = None
        optimizer = work.local.optimizer
        self.optimizer = (
            optimizer.make(layout, self.rows, self.gradients)
            if optimizer.flat
            else optimizer.over(dict(work.model.named_parameters()))
        )

    def train(self, jobs: Sequence[CohortMember], states: States, sink: Sink) -> None:
        self.work.local.optimizer.set_rates(self.optimizer)
        self.work.model.train()
        gathered = Gathered(self.rows, self._room)
        self._room = gathered.rows
        with preserved_generators():
            try:
                for job in jobs:
                    began = time.perf_counter()
                    own = states([job.client])
                    try:
                        trained = self._train(job, own)
                    except Exception as error:
                        raise ClientError(
                            job, f"client {self.work.clients.name(job.client)}: {error}"
                        ) from error
                    gathered.take(trained, time.perf_counter() - began, sink)
            finally:
                gathered.give(sink)

    def _train(self, job: CohortMember, own: dict[str, torch.Tensor]) -> Trained:
        work, server, local = self.work, self.server, self.work.local
        numbers = server.layout.trained
        start, indices = server.start(own), work.clients.samples(job.client)
        batches = list(local.batches(indices, work.seed, server.round, job.client))
        if work.samples.tensors is not None:  # one copy to the device a client, not one a step
            batches = list(
                torch.cat(batches)
                .to(server.device, non_blocking=True)
                .split([len(batch) for batch in batches])
            )
        self._prepare(batches)
        self.rows.copy_(start)
        server.layout.write_integers(server.integers, work.model)
        restart(self.optimizer)
        seed = derive_seed(work.seed, "noise", server.round, job.client)
        # torch.manual_seed would also ask all kinds of devices that are not there.
        torch.default_generator.manual_seed(seed)
        if server.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        keys = self.noise.keys(work.seed, server.round, job.client, len(batches)).to(
            server.device, non_blocking=True
        )
        total = torch.zeros((), dtype=torch.float64, device=server.device)
        start_loss = self._start_loss(indices, job) if work.algorithm.needs_start_loss else None
        if work.algorithm.needs_start_gradient:
            own[START_GRADIENT] = self._start_gradient(indices, job)
        for step, batch in enumerate(batches):
            total.add_(self._gradient(job, step, batch, keys[step]), alpha=len(batch))
            if work.algorithm.corrects:
                work.algorithm.correct(
                    self.gradients, self.rows[:, :numbers], start[..., :numbers], own
                )
            if local.clip_norm is not None:
                clip_rows(self.gradients, local.clip_norm)
            self.optimizer.step()
        return Trained(
            clients=[job.client],
            slots=[job.slot],
            rows=self.rows,
            start=start,
            samples=torch.tensor([float(len(indices))], dtype=torch.float64),
            steps=torch.tensor([float(len(batches))], dtype=torch.float64),
            loss=(total / max(sum(map(len, batches)), 1)).reshape(1),
            start_loss=start_loss,
            own=own,
            integers=server.layout.read_integers(work.model)[None]
            if server.layout.integers
            else None,
        )

    def _prepare(self, batches: list[torch.Tensor]) -> None:
        """Called with a client's batches before its weights are in the row."""

    def _gradient(
        self, job: CohortMember, step: int, batch: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Leave the gradient of the mean loss of a batch (indices of samples) in `gradients`;
        returns the loss."""
        work = self.work
        self.gradients.zero_()
        self.noise.set(keys)
        self.noise.begin()
        taken = work.samples.take(batch, work.seed, self.server.round, job.client, step)
        with self.precision.autocast():
            output, target = work.local.forward(work.model, taken)
            if step == 0:
                self.rule.check_shapes(output, target)
            loss = work.local.criterion(output, target)
        if step == 0:
            LossRule.check_value(loss)
        self.noise.end()
        loss.backward()
        return loss.detach()

    def _start_loss(self, indices: torch.Tensor, job: CohortMember) -> torch.Tensor:
        """The mean loss of the model as it lies in the row over a client's data: float64, shape
        ``[1]``."""
        model, local = self.work.model, self.work.local
        total = torch.zeros((), dtype=torch.float64, device=self.server.device)
        with torch.no_grad(), measuring(model):
            for batch in indices.split(max(local.batch_size or 0, 256)):
                total += self._measured(batch, job) * len(batch)
        return (total / len(indices)).reshape(1)

    def _start_gradient(self, indices: torch.Tensor, job: CohortMember) -> torch.Tensor:
        """The gradient of the mean loss of the model as it lies in the row over a client's data:
        shape ``[1, trained]``."""
        model, local = self.work.model, self.work.local
        self.gradients.zero_()
        with measuring(model):
            for batch in indices.split(local.batch_size or len(indices)):
                (self._measured(batch, job) * (len(batch) / len(indices))).backward()
        return self.gradients.clone()

    def _measured(self, batch: torch.Tensor, job: CohortMember) -> torch.Tensor:
        work = self.work
        taken = work.samples.take(batch, work.seed, "start", job.client)
        with self.precision.autocast():
            output, target = work.local.forward(work.model, taken)
            return work.local.criterion(output, target)
