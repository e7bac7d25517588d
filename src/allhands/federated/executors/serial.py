"""One client after another, in one model whose weights are copied in place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

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
    wait_for,
)
from allhands.federated.executors.starting import measuring
from allhands.federated.keyed_noise import KeyedNoise
from allhands.federated.local_training import plain_step, restart
from allhands.step import LossRule, Precision
from allhands.step.update import backward, update_function

#: Clients that are handed over at once, by kind of device. What is done with clients that have
#: trained waits for the device, and a GPU that is waited for after every small client is idle for a
#: part of the time.
AT_ONCE = {"cuda": 16}
_BYTES = 2**28  # at most, of their rows


class Gathered:
    """A `Sink` that keeps clients until there are so many that their rows are worth an exchange
    with `sink`.

    Args:
        row: a client's row, shape ``[1, length]``.
        rows: where they are kept, from an earlier round; None at first.
    """

    def __init__(self, row: torch.Tensor, rows: torch.Tensor | None) -> None:
        most = AT_ONCE.get(row.device.type, 1)
        most = int(min(most, max(1, _BYTES // (row.shape[1] * row.element_size()))))
        self.rows = rows if rows is not None or most == 1 else row.new_zeros(most, row.shape[1])
        self._kept: list[Trained] = []
        self._began = time.perf_counter()

    def take(self, trained: Trained, seconds: float, sink: Sink) -> None:
        """Keep one client, and hand all over when there is no room for another."""
        if self.rows is None:
            sink(trained, seconds)
            return
        self.rows[len(self._kept)].copy_(trained.rows[0])
        self._kept.append(trained)
        if len(self._kept) == len(self.rows):
            self.give(sink)

    def give(self, sink: Sink) -> None:
        """Hand over those that are kept."""
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        assert self.rows is not None
        own = {name: torch.cat([one.own[name] for one in kept]) for name in kept[0].own}
        whole = Trained(
            [one.clients[0] for one in kept],
            [one.slots[0] for one in kept],
            self.rows[: len(kept)],
            kept[0].start if kept[0].start.dim() == 1 else torch.cat([one.start for one in kept]),
            torch.cat([one.samples for one in kept]),
            torch.cat([one.steps for one in kept]),
            torch.cat([one.loss for one in kept]),
            _join([one.start_loss for one in kept]),
            own,
            _join([one.integers for one in kept]),
        )
        wait_for(self.rows.device)
        sink(whole, (time.perf_counter() - self._began) / len(kept))
        self._began = time.perf_counter()


def _join(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None


class Serial(Executor):
    """Any model, any loss, any optimizer, on any device.

    The model's weights are views into one row: a client costs one copy. Backward passes write new
    gradients, which the optimizer reads where they are, or which are copied into one row at once
    where something works on all of a gradient: adding to what lies there takes twice the time.
    """

    name = "serial"
    #: Whether `_gradient` of a subclass leaves gradients in `gradients` by itself.
    writes_row = False

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
        self._taken: list[Any] | None = None
        self._one = torch.ones((), device=server.device)  # the gradient of a loss
        self._first = 0  # of a client's steps, among those of all
        named = dict(work.model.named_parameters())
        self._weights = [named[place.name] for place in layout.parameters]
        self._slots = [
            self.gradients[0, place.start : place.stop].view(place.shape)
            for place in layout.parameters
        ]
        optimizer = work.local.optimizer
        # On a GPU each operation on a list of tensors costs more than those on one do, but that of
        # plain SGD is the only one.
        self._in_row = (
            (server.device.type != "cpu" and not optimizer.plain)
            or work.algorithm.corrects
            or work.local.clip_norm is not None
            or self.writes_row
        )
        if optimizer.flat and self._in_row:
            self.optimizer = optimizer.make(layout, self.rows, self.gradients)
        else:
            self.optimizer = optimizer.over(named)
        self._update = update_function(self.optimizer, plain_step if optimizer.plain else None)

    def train(self, jobs: Sequence[CohortMember], states: States, sink: Sink) -> None:
        self.work.local.optimizer.set_rates(self.optimizer)
        self.work.model.train()
        gathered = Gathered(self.rows, self._room)
        self._room = gathered.rows
        with preserved_generators():
            try:
                every = self._keys_of(jobs)
                self.noise.set_steps(every.flatten(0, 1))
                for place, (job, keys) in enumerate(zip(jobs, every, strict=True)):
                    self._first = place * len(keys)
                    began = time.perf_counter()
                    own = states([job.client])
                    try:
                        trained = self._train(job, own, keys)
                    except Exception as error:
                        raise ClientError(
                            job, f"client {self.work.clients.name(job.client)}: {error}"
                        ) from error
                    gathered.take(trained, time.perf_counter() - began, sink)
            finally:
                gathered.give(sink)

    def _keys_of(self, jobs: Sequence[CohortMember]) -> torch.Tensor:
        """The keys of all clients' steps, shape ``[clients, steps, layers]``: of many clients they
        take little longer than of one."""
        work = self.work
        steps = [work.local.num_steps(work.clients.size(job.client)) for job in jobs]
        clients = [job.client for job in jobs]
        made = self.noise.keys_of(work.seed, self.server.round, clients, max(steps, default=0))
        return made.to(self.server.device, non_blocking=True)

    def _train(
        self, job: CohortMember, own: dict[str, torch.Tensor], keys: torch.Tensor
    ) -> Trained:
        """Train a client.

        Args:
            job: the client.
            own: its own vectors.
            keys: of its steps, shape ``[steps, layers]``; there may be more than it takes.
        """
        work, server, local = self.work, self.server, self.work.local
        numbers = server.layout.trained
        start, indices = server.start(own), work.clients.samples(job.client)
        order, sizes = local.order(indices, work.seed, server.round, job.client)
        taken = torch.from_numpy(order)
        if work.samples.tensors is not None:  # one copy to the device a client, not one a step
            taken = taken.to(server.device, non_blocking=True)
        batches = list(taken.split(sizes))
        keys = keys[: len(batches)]
        self._prepare(taken, sizes)
        self.rows.copy_(start)
        if server.layout.integers:
            server.layout.write_integers(server.integers, work.model)
        restart(self.optimizer)
        seed = derive_seed(work.seed, "noise", server.round, job.client)
        # torch.manual_seed would also ask all kinds of devices that are not there.
        torch.default_generator.manual_seed(seed)
        if server.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        losses = []
        start_loss = self._start_loss(indices, job) if work.algorithm.needs_start_loss else None
        if work.algorithm.needs_start_gradient:
            own[START_GRADIENT] = self._start_gradient(indices, job)
        for step, batch in enumerate(batches):
            losses.append(self._gradient(job, step, batch, keys))
            if work.algorithm.corrects:
                work.algorithm.correct(
                    self.gradients, self.rows[:, :numbers], start[..., :numbers], own
                )
            if local.clip_norm is not None:
                clip_rows(self.gradients, local.clip_norm)
            self._update()
        return Trained(
            clients=[job.client],
            slots=[job.slot],
            rows=self.rows,
            start=start,
            samples=torch.tensor([float(len(indices))], dtype=torch.float64),
            steps=torch.tensor([float(len(batches))], dtype=torch.float64),
            loss=_mean(losses, sizes, server.device),
            start_loss=start_loss,
            own=own,
            integers=server.layout.read_integers(work.model)[None]
            if server.layout.integers
            else None,
        )

    def _prepare(self, taken: torch.Tensor, sizes: list[int]) -> None:
        """Called with the indices of a client's samples and the sizes of its batches before its
        weights are in the row: reads the samples of all steps by one operation where they lie in
        memory and are few."""
        self._taken = self.work.samples.take_all(taken, sizes)

    def _gradient(
        self, job: CohortMember, step: int, batch: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Leave the gradient of the mean loss of a batch (indices of samples) in `gradients`, or,
        where nothing needs them there, in the parameters' own.

        Args:
            job: the client.
            step: of the client's.
            batch: indices of samples.
            keys: of all of the client's steps, shape ``[steps, layers]``.

        Returns:
            The loss, shape ``[]``, which later steps leave as it is.
        """
        work = self.work
        for weight in self._weights:
            weight.grad = None
        self.noise.set_step(self._first + step)
        self.noise.begin()
        if self._taken is not None:
            taken = self._taken[step]
        else:
            taken = work.samples.take(batch, work.seed, self.server.round, job.client, step)
        with self.precision.autocast():
            output, target = work.local.forward(work.model, taken)
            if step == 0:
                self.rule.check_shapes(output, target)
            loss = work.local.criterion(output, target)
        if step == 0:
            LossRule.check_value(loss)
        self.noise.end()
        if self._one.dtype != loss.dtype:
            self._one = self._one.to(loss.dtype)
        backward(loss, self._one)
        made = self._made()
        if self._in_row:
            self._put_in_row(made)
        return loss.detach()

    def _made(self) -> list[torch.Tensor]:
        """What a backward pass has left in the parameters, dense; zeros where it left nothing, so
        that an optimizer treats all parameters alike."""
        for weight in self._weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            elif weight.grad.layout != torch.strided:
                weight.grad = weight.grad.to_dense()
        return [weight.grad for weight in self._weights if weight.grad is not None]

    def _put_in_row(self, made: list[torch.Tensor]) -> None:
        """Let the parameters' gradients lie in `gradients`, and be these."""
        torch._foreach_copy_(self._slots, made)
        self._bind_slots()

    def _bind_slots(self) -> None:
        for weight, slot in zip(self._weights, self._slots, strict=True):
            weight.grad = slot

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
        self._bind_slots()
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


def _mean(losses: list[torch.Tensor], samples: list[int], device: torch.device) -> torch.Tensor:
    """The mean of steps' losses, weighted by their samples: float64, shape ``[1]``."""
    if not losses:
        return torch.zeros(1, dtype=torch.float64, device=device)
    values = torch.stack(losses).double()
    if len(set(samples)) > 1:
        shares = torch.tensor(samples, dtype=torch.float64) * (len(samples) / sum(samples))
        values = values * shares.to(device, non_blocking=True)
    return values.mean().reshape(1)
