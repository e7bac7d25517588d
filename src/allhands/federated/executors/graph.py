"""One client after another, with the gradient of a step recorded in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

from allhands.errors import UserError
from allhands.federated.algorithms.base import Server
from allhands.federated.executors.base import CohortMember, ExecutorContext
from allhands.federated.executors.graph_capture import GraphCapture
from allhands.federated.executors.serial import Serial
from allhands.federated.executors.trial import why_not_fixed
from allhands.step import LossRule


class Graph(Serial):
    """`Serial`, for which the device does not wait for Python: a small model's step is dozens of
    operations that each take the device less time than it takes to ask for them.

    A graph for each size of a step holds the reading of the batch, the forward and the backward
    pass. The algorithm's correction, clipping and the optimizer are few operations on flat vectors
    and run as in `Serial`, so that any of them, and any schedule of learning rates, will do. CUDA
    only; the model, the criterion and `forward` must not ask the device for a number (``.item()``),
    and data must lie in memory.
    """

    name = "graph"
    writes_row = True

    def __init__(self, work: ExecutorContext, server: Server) -> None:
        super().__init__(work, server)
        self._keys = torch.zeros(len(self.noise.names), dtype=torch.int32, device=server.device)
        self._loss = torch.zeros((), dtype=torch.float64, device=server.device)
        self._recorder = GraphCapture(server.device)
        self._recorded: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}

    @classmethod
    def refuses(cls, work: ExecutorContext, server: Server) -> str | None:
        if server.device.type != "cuda":
            return (
                f"it records CUDA graphs, and the device is '{server.device.type}'; write "
                "executor='serial'"
            )
        return why_not_fixed(work, server)

    def _prepare(self, taken: torch.Tensor, sizes: list[int]) -> None:
        """Captures a graph for each size, which reads the samples."""
        for size in sorted(set(sizes) - set(self._recorded), reverse=True):
            self._recorded[size] = self._record(size)

    def _gradient(
        self, job: CohortMember, step: int, batch: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        indices, replay = self._recorded[len(batch)]
        indices.copy_(batch)
        if self.noise.names:
            self._keys.copy_(keys[step])
        replay()
        return self._loss.clone()

    def _record(self, size: int) -> tuple[torch.Tensor, Callable[[], None]]:
        work = self.work
        indices = torch.arange(size, device=self.server.device) % len(work.samples)
        self.noise.set(self._keys)

        def gradient() -> None:
            self.noise.begin()
            with self.precision.autocast():
                output, target = work.local.forward(work.model, work.samples.take(indices))
                self.rule.check_shapes(output, target)
                loss = work.local.criterion(output, target)
            LossRule.check_value(loss)
            self.noise.end()
            made = torch.autograd.grad(loss, self._weights, allow_unused=True)
            self._put_in_row(
                [
                    torch.zeros_like(slot) if one is None else one
                    for slot, one in zip(self._slots, made, strict=True)
                ]
            )
            self._loss.copy_(loss.detach())

        try:
            return indices, self._recorder.record(gradient)
        except RuntimeError as error:
            raise UserError(
                f"executor='graph' cannot record a step of {size} samples: {error}; write "
                "executor='serial'"
            ) from error
