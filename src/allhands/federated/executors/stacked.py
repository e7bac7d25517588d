"""Many clients in one batched step."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from allhands.checks import check_whole
from allhands.comm.clipping import clip_rows
from allhands.errors import UserError
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
from allhands.federated.executors.graph_capture import GraphCapture
from allhands.federated.executors.stack import Losses, Stack
from allhands.federated.executors.stacked_check import differs_from_alone
from allhands.federated.executors.starting import in_parts, measuring
from allhands.federated.executors.trial import look, some_samples, why_not_fixed
from allhands.federated.local_training import LocalOptimizer, restart

_MOST = 64  # clients of a chunk: more of them rarely go faster, and their activations need memory
# sizes of chunks that are recorded before a smaller chunk takes the recording of a larger one
_GRAPHS = 4


@dataclass
class ChunkPlan:
    """What the clients of a chunk do, step by step; made on the processor while the device is busy
    with the chunk before.

    Attributes:
        jobs, steps, samples: of the clients, those with the most steps first.
        indices: for each step the samples of its batches, int64, shape ``[rows, width]``; rows
            beyond the clients repeat the first client, and what is padded repeats a sample of its
            batch.
        counts: samples that count, shape ``[steps, rows]``.
        keys: of dropout layers, int32, shape ``[steps, rows, layers]``.
    """

    jobs: list[CohortMember]
    steps: list[int]
    samples: list[int]
    indices: list[torch.Tensor]
    counts: torch.Tensor
    keys: torch.Tensor


class Stacked(Executor):
    """One step of many clients is one batched step of `torch.func.vmap`, with one optimizer for all
    their rows.

    Clients with the most steps begin a chunk together, and each is handed over after its last one.
    Short batches are padded and masked sample by sample, which is exact, where the criterion is
    known to be a mean over samples and the model treats samples apart; elsewhere (BatchNorm in
    training, a loss of the user's) only clients whose batches have the same sizes share a chunk.

    Args:
        chunk: clients at once; None: as many as fit the memory, at most 64. Halved when memory runs
            out.
        compile: fuse the step by `torch.compile`; the first chunk of each size takes longer by 15
            to 35 s or more.
        record: record each step's gradient in a CUDA graph; None: on CUDA.
    """

    name = "stacked"
    together = True

    def __init__(
        self,
        work: ExecutorContext,
        server: Server,
        chunk: int | None = None,
        compile: bool = False,
        record: bool | None = None,
    ) -> None:
        super().__init__(work, server)
        check_whole("executor: chunk", chunk, otherwise="None for what fits")
        if not isinstance(compile, bool) or not (record is None or isinstance(record, bool)):
            raise UserError(
                f"executor: compile={compile!r}, record={record!r}; they must be True or False "
                "(record may be None)"
            )
        if record and server.device.type != "cuda":
            raise UserError(
                f"executor: record=True needs CUDA, and the device is '{server.device.type}'; "
                "write record=None"
            )
        self.chunk, self.compile = chunk, compile
        self.flat = work.algorithm.corrects or work.local.clip_norm is not None
        self.record = server.device.type == "cuda" if record is None else record
        work.model.to(server.device)
        self.losses = Losses(work, server)
        self.pads = self.losses.masked.masks and not look(work, server).couples
        sizes = int(work.clients.sizes.max())
        self.largest = min(work.local.batch_size or sizes, sizes)  # samples of a full batch
        self._recorder = GraphCapture(server.device) if self.record else None
        self._stacks: dict[int, Stack] = {}

    @classmethod
    def refuses(cls, work: ExecutorContext, server: Server) -> str | None:
        if not work.local.optimizer.flat:
            return (
                f"{work.local.optimizer.kind.__name__} updates a number by others' gradients too, "
                "and the rows of clients "
                f"are updated number by number; use one of {', '.join(LocalOptimizer.ELEMENTWISE)}"
            )
        refusal = why_not_fixed(work, server)
        return refusal if refusal is not None else differs_from_alone(work, server)

    def train(self, jobs: Sequence[CohortMember], states: States, sink: Sink) -> None:
        if not jobs:
            return
        self.work.model.train()
        if self.chunk is None:
            self.chunk = self._fitting()
        waiting = deque(self._chunks(jobs))
        plan: ChunkPlan | None = self._plan(waiting.popleft())
        while plan is not None:
            following, done, began = None, 0, time.perf_counter()
            training: Iterator[Trained] | None = self._train(plan, states)
            while training is not None and done < len(plan.jobs):
                try:
                    trained = next(training)
                    # While the device is busy.
                    if done + len(trained.clients) == len(plan.jobs) and waiting:
                        following = self._plan(waiting.popleft())
                    wait_for(self.server.device)
                except torch.cuda.OutOfMemoryError:
                    if len(plan.jobs) == 1:
                        raise
                    training = None  # what it holds is only free after this block
                    continue
                except UserError:
                    raise
                except Exception:
                    self._blame(plan.jobs[: len(plan.jobs) - done], states, sink)
                    raise
                sink(trained, (time.perf_counter() - began) / len(plan.jobs))
                done += len(trained.clients)
            if training is None:
                self._shrink(-(-len(plan.jobs) // 2))
                left = [
                    *plan.jobs[: len(plan.jobs) - done],
                    *(job for chunk in waiting for job in chunk),
                    *(following.jobs if following else ()),
                ]
                waiting = deque(self._chunks(left))
                following = self._plan(waiting.popleft())
            plan = following

    def _blame(self, jobs: list[CohortMember], states: States, sink: Sink) -> None:
        """Train clients of a chunk that failed one by one, so that the one that fails is named."""
        for job in jobs:
            began = time.perf_counter()
            try:
                (trained,) = self._train(self._plan([job]), states)
            except Exception as error:
                raise ClientError(
                    job, f"client {self.work.clients.name(job.client)}: {error}"
                ) from error
            sink(trained, time.perf_counter() - began)

    # -------------------------------------------------------------- which clients, and what they do

    def _chunks(self, jobs: Sequence[CohortMember]) -> list[list[CohortMember]]:
        """Jobs that are trained together, those with the most steps first, in chunks of about the
        same size."""
        assert self.chunk is not None
        local, groups = self.work.local, dict[Any, list[CohortMember]]()
        size = {job: self.work.clients.size(job.client) for job in jobs}
        for job in sorted(
            jobs, key=lambda job: (-local.num_steps(size[job]), -size[job], job.slot)
        ):
            groups.setdefault(None if self.pads else size[job], []).append(job)
        chunks = []
        for group in groups.values():
            pieces = -(-len(group) // self.chunk)
            bounds = [len(group) * piece // pieces for piece in range(pieces + 1)]
            chunks += [group[a:b] for a, b in itertools.pairwise(bounds)]
        return chunks

    def _plan(self, jobs: list[CohortMember]) -> ChunkPlan:
        work, server = self.work, self.server
        orders, sizes = zip(
            *(
                work.local.order(
                    work.clients.samples(job.client), work.seed, server.round, job.client
                )
                for job in jobs
            ),
            strict=True,
        )
        steps, rows = len(sizes[0]), self._rows(len(jobs))
        of_row = [*range(len(jobs)), *[0] * (rows - len(jobs))]
        if self.pads and self.record:  # few recordings: one, or for full batches at most eight
            grain = self.largest if work.local.batch_size is not None else -(-self.largest // 8)
            widths = [min(-(-max(map(max, sizes)) // grain) * grain, self.largest)] * steps
        else:
            widths = [max(own[step] for own in sizes if step < len(own)) for step in range(steps)]
        indices = [np.empty((rows, width), dtype=np.int64) for width in widths]
        counts = np.ones((steps, rows))
        alike: dict[tuple[int, ...], list[int]] = {}
        for row, job in enumerate(of_row):
            alike.setdefault(tuple(sizes[job]), []).append(row)
        for own, members in alike.items():
            taken = np.stack([orders[of_row[row]] for row in members])
            ends = np.cumsum(own)
            for step, table in enumerate(indices):
                last = min(
                    step,
                    len(own) - 1,
                    # a client that has finished repeats its last batch; nobody looks at what
                    # becomes of it
                )
                count = min(own[last], table.shape[1])
                batch = taken[:, ends[last] - own[last] :][:, :count]
                table[members, :count], table[members, count:] = batch, batch[:, :1]
                counts[step, members] = count
        keys = self.losses.noise.keys_of(
            work.seed, server.round, [jobs[job].client for job in of_row], steps
        ).transpose(0, 1)
        flat = torch.from_numpy(np.concatenate([table.reshape(-1) for table in indices])).to(
            server.device, non_blocking=True
        )
        placed = [part.view(rows, -1) for part in flat.split([rows * width for width in widths])]
        return ChunkPlan(
            jobs,
            [len(own) for own in sizes],
            [work.clients.size(job.client) for job in jobs],
            placed,
            torch.from_numpy(counts).to(server.device, server.layout.dtype, non_blocking=True),
            keys.contiguous().to(server.device, non_blocking=True),
        )

    def _rows(self, jobs: int) -> int:
        """Rows of the stack for so many clients: as many, unless a recording of a few more is
        there."""
        if (
            (self.record or self.compile)
            and jobs not in self._stacks
            and len(self._stacks) >= _GRAPHS
        ):
            return min((rows for rows in self._stacks if rows > jobs), default=jobs)
        return jobs

    # ------------------------------------------------------------------ the training

    def _stack(self, rows: int) -> Stack:
        if rows not in self._stacks:
            if (self.record or self.compile) and len(self._stacks) > _GRAPHS:
                self._stacks.clear()
            self._stacks[rows] = Stack(
                self.losses, rows, self.pads, self._recorder, self.compile, self.flat
            )
        return self._stacks[rows]

    def _train(self, plan: ChunkPlan, states: States) -> Iterator[Trained]:
        """Train a chunk; yields clients after their last steps."""
        work, server = self.work, self.server
        algorithm, local, numbers = work.algorithm, work.local, server.layout.trained
        rows = plan.counts.shape[1]
        stack = self._stack(rows)
        for indices in plan.indices:
            stack.prepare(indices.shape[1])
        clients = [job.client for job in plan.jobs]
        own = states(clients + clients[:1] * (rows - len(clients)))
        start = server.start(own)
        stack.load(start, server.integers)
        local.optimizer.set_rates(stack.optimizer)
        restart(stack.optimizer)
        start_loss = self._start_loss(stack, plan) if algorithm.needs_start_loss else None
        if algorithm.needs_start_gradient:
            own[START_GRADIENT] = self._start_gradient(stack, plan)
        total = torch.zeros(rows, dtype=torch.float64, device=server.device)
        seen = plan.counts.to(torch.float64).cumsum(0)
        left = len(plan.jobs)
        for step, indices in enumerate(plan.indices):
            total += stack.gradient(indices, plan.counts[step], plan.keys[step]) * plan.counts[step]
            if algorithm.corrects:
                algorithm.correct(
                    stack.gradients, stack.rows[:, :numbers], start[..., :numbers], own
                )
            if local.clip_norm is not None:
                clip_rows(stack.gradients, local.clip_norm)
            stack.optimizer.step()
            first = sum(steps > step + 1 for steps in plan.steps)
            if first < left:
                stack.finish(first, left)
                yield Trained(
                    clients=clients[first:left],
                    slots=[job.slot for job in plan.jobs[first:left]],
                    rows=stack.rows[first:left],
                    start=start if start.dim() == 1 else start[first:left],
                    samples=torch.tensor(plan.samples[first:left], dtype=torch.float64),
                    steps=torch.tensor(plan.steps[first:left], dtype=torch.float64),
                    loss=(total / seen[step])[first:left],
                    start_loss=None if start_loss is None else start_loss[first:left],
                    own={name: vectors[first:left] for name, vectors in own.items()},
                    integers=stack.integers()[first:left] if server.layout.integers else None,
                )
                left = first

    def _start_loss(self, stack: Stack, plan: ChunkPlan) -> torch.Tensor:
        """Mean losses over each client's data of the models as they lie in the rows: float64, shape
        ``[rows]``."""
        held, sizes = self._held(stack, plan)
        total = torch.zeros_like(sizes)
        with measuring(self.work.model):
            for indices, counts in in_parts(
                held, max(self.work.local.batch_size or 0, 256), self.server.device
            ):
                losses = stack.evaluate(indices, counts.clamp(min=1.0))
                total += torch.where(counts > 0, losses * counts, 0.0)
        return total / sizes

    def _start_gradient(self, stack: Stack, plan: ChunkPlan) -> torch.Tensor:
        """Gradients of the mean losses over each client's data, of the models as they lie in the
        rows: ``[rows, trained]``."""
        held, sizes = self._held(stack, plan)
        total = torch.zeros(
            len(held),
            self.server.layout.trained,
            dtype=self.server.layout.dtype,
            device=self.server.device,
        )
        with measuring(self.work.model):
            # As many samples as a step has room for.
            for indices, counts in in_parts(held, self.largest, self.server.device):
                total += stack.differentiate(indices, counts.clamp(min=1.0), counts / sizes)
        return total

    def _held(self, stack: Stack, plan: ChunkPlan) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The samples of each row's client, and how many they are: float64, shape ``[rows]``."""
        held = [self.work.clients.samples(job.client) for job in plan.jobs]
        held += held[:1] * (len(stack.rows) - len(held))
        return held, torch.tensor(
            [float(len(samples)) for samples in held],
            dtype=torch.float64,
            device=self.server.device,
        )

    # ------------------------------------------------------------------ memory

    def _fitting(self) -> int:
        """Clients of a chunk that fit the free memory, by what two of them need."""
        layout, device = self.server.layout, self.server.device
        numbers = layout.length * layout.dtype.itemsize
        if device.type != "cuda":
            return int(min(_MOST, max(1, 2**28 // numbers)))
        stack = Stack(self.losses, 2, self.pads, None, False, self.flat)
        stack.load(self.server.weights, self.server.integers)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        indices = some_samples(self.work)[:1].expand(2, self.largest).to(device)
        stack.gradient(
            indices,
            torch.full((2,), float(indices.shape[1]), dtype=layout.dtype, device=device),
            torch.zeros(2, len(self.losses.noise.names), dtype=torch.int32, device=device),
        )
        torch.cuda.synchronize(device)
        step = (torch.cuda.max_memory_allocated(device) - before) / 2
        # Weights, gradients, two vectors of the optimizer, the update, and the update in float64
        # three times while it is summed.
        each = step + 5 * numbers + 3 * 8 * layout.length
        free = (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
        return int(min(_MOST, max(1, 0.7 * free // each)))

    def _shrink(self, chunk: int) -> None:
        """Make room: let stacks of other sizes go, or where there is none, go on with so many
        clients at once."""
        if len(self._stacks) <= 1:
            self.chunk = chunk
            print(f"executor stacked: out of memory, going on with chunk={chunk}", flush=True)
        self._stacks.clear()
        if self._recorder is not None:
            self._recorder = GraphCapture(self.server.device)
        torch.cuda.empty_cache()
