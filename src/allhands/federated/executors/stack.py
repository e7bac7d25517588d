"""The rows of clients that are trained at once, and one batched gradient of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap

from allhands.errors import UserError
from allhands.federated.algorithms.base import Server
from allhands.federated.executors import unfolded
from allhands.federated.executors.base import ExecutorContext
from allhands.federated.executors.graph_capture import GraphCapture
from allhands.federated.executors.masked import MaskedLoss
from allhands.federated.executors.narrowed import autocast, widened
from allhands.federated.keyed_noise import KeyedNoise
from allhands.step import LossRule, Precision


class Losses(nn.Module):
    """A client's loss as a function of its weights, for `torch.func.functional_call`.

    Args:
        work: its model is changed: dropout by keys, and on CUDA convolutions of few channels.
        server: says where weights lie.
    """

    def __init__(self, work: ExecutorContext, server: Server) -> None:
        super().__init__()
        self.model = work.model
        self.noise = KeyedNoise(work.model, server.device)
        if server.device.type in unfolded.DEVICES:
            unfolded.unfold_convolutions(work.model)
        self.masked = MaskedLoss(work.local.criterion)
        self.server, self.work = server, work
        self._rule = LossRule(work.local.criterion)
        self.precision = Precision(work.local.precision, server.device)

    def forward(self, batch: Any, mask: torch.Tensor | None) -> torch.Tensor:
        output, target = self.work.local.forward(self.model, batch)
        self._rule.check_shapes(output, target)
        if self.precision.casts:
            output = widened(output)  # autocast computes losses in float32
        loss = self.masked(output, target, mask)
        LossRule.check_value(loss)
        return loss

    def of(
        self, tensors: dict[str, torch.Tensor], batch: Any, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The loss with the model's weights, buffers and keys of dropout replaced."""
        return functional_call(
            self, {f"model.{name}": tensor for name, tensor in tensors.items()}, (batch, mask)
        )


class Stack:
    """Rows of so many clients with their gradients, buffers and optimizer.

    Args:
        losses: the loss of a client.
        count: clients.
        pads: batches are masked by the counts; else all samples count.
        recorder: records the gradients; None: they are computed operation by operation.
        compile: by `torch.compile`.
        flat: keep weights in `rows` and gather gradients in `gradients`, for what works on whole
            rows of them. Else the clients' values of a weight lie in one block, in the order in
            which the backward pass leaves its gradient, and the optimizer reads that there: fewer
            passes over memory, and none that jumps.

    Attributes:
        rows: shape ``[count, length]``; without `flat` what `finish` has brought.
        gradients: shape ``[count, trained]``, or without `flat` ``[count, 0]``.
        optimizer: of all rows.
    """

    def __init__(
        self,
        losses: Losses,
        count: int,
        pads: bool,
        recorder: GraphCapture | None,
        compile: bool,
        flat: bool,
    ) -> None:
        server = losses.server
        layout, device = server.layout, server.device
        self.losses, self.pads, self.recorder = losses, pads, recorder
        self.compiled, self.flat = compile, flat
        self.rows = torch.zeros(count, layout.length, dtype=layout.dtype, device=device)
        self.gradients = torch.zeros(
            count, layout.trained if flat else 0, dtype=layout.dtype, device=device
        )
        self._views = views = layout.views(self.rows)
        optimizer = losses.work.local.optimizer
        if flat:
            # `.data`, for a write to a buffer of the same row is none to a weight that the backward
            # pass needs.
            self._weights = {
                place.name: views[place.name].data.requires_grad_() for place in layout.parameters
            }
            self.optimizer = optimizer.make(layout, self.rows, self.gradients)
        else:
            self._weights = {
                place.name: views[place.name].contiguous().clone().requires_grad_()
                for place in layout.parameters
            }
            self.optimizer = optimizer.over(self._weights)
        # BatchNorm under vmap writes its statistics to copies, unless each buffer's lie in one
        # piece.
        self._buffers = {
            place.name: views[place.name].contiguous().clone() for place in layout.buffers
        }
        named = dict(losses.model.named_buffers())
        self._integers = {
            name: named[name].expand(count, *named[name].shape).clone() for name in layout.integers
        }
        self._keys = torch.zeros(count, len(losses.noise.names), dtype=torch.int32, device=device)
        self._counts = torch.ones(count, dtype=layout.dtype, device=device)
        self._loss = torch.zeros(count, dtype=torch.float64, device=device)
        self._steps: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}
        self._made: dict[int, list[torch.Tensor]] = {}
        call = vmap(losses.of, in_dims=(0, 0, 0 if pads else None), randomness="error")
        self._plain = call
        self._call = torch.compile(call, fullgraph=True, dynamic=False) if compile else call

    def load(self, start: torch.Tensor, integers: torch.Tensor) -> None:
        """Begin with these weights, shape ``[length]`` or ``[count, length]``, and integer
        buffers."""
        given = self.losses.server.layout.views(start if start.dim() == 2 else start[None])
        if self.flat:
            self.rows.copy_(start)
        with torch.no_grad():
            for name, tensor in {**({} if self.flat else self._weights), **self._buffers}.items():
                tensor.copy_(given[name])
        at = 0
        for buffer in self._integers.values():
            size = buffer[0].numel()
            buffer.copy_(integers[at : at + size].view(buffer.shape[1:]))
            at += size

    def finish(self, first: int, last: int) -> None:
        """Bring what lies elsewhere into the rows `first` to `last`."""
        with torch.no_grad():
            for name, tensor in {**({} if self.flat else self._weights), **self._buffers}.items():
                self._views[name][first:last].copy_(tensor[first:last])

    def integers(self) -> torch.Tensor:
        """The integer buffers: int64, shape ``[count, numbers]``."""
        parts = [
            buffer.flatten(1) if buffer.dim() > 1 else buffer[:, None]
            for buffer in self._integers.values()
        ]
        if parts:
            return torch.cat([part.to(torch.int64) for part in parts], 1)
        return self._keys.new_zeros(len(self.rows), 0).long()

    def prepare(self, width: int) -> None:
        """Make ready for batches of `width` samples; recording one overwrites the rows."""
        if width in self._steps:
            return
        device = self.rows.device
        indices = (
            (torch.arange(width, device=device) % len(self.losses.work.samples))
            .expand(len(self.rows), width)
            .clone()
        )

        def gradient() -> None:
            losses = self._evaluate(self._call, indices, self._counts)
            gradients = torch.autograd.grad(
                losses.sum(), list(self._weights.values()), allow_unused=True
            )
            made = [
                torch.zeros_like(weight) if value is None else value
                for weight, value in zip(self._weights.values(), gradients, strict=True)
            ]
            if self.flat:
                for place, value in zip(self.losses.server.layout.parameters, made, strict=True):
                    self.gradients[:, place.start : place.stop].view(value.shape).copy_(value)
            else:
                self._made[width] = made
            self._loss.copy_(losses.detach())

        self._counts.fill_(float(width))
        try:
            if not self.flat and not self._steps:
                self._lay(indices)
            if self.compiled:
                # Layers of dropout make what they keep, which the compiler must not.
                self.evaluate(indices, self._counts)
            if self.recorder is not None:
                self._steps[width] = indices, self.recorder.record(gradient)
                return
            if self.compiled:
                gradient()
            self._steps[width] = indices, gradient
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UserError(
                f"executor='stacked' cannot {'compile' if self.compiled else 'record'} a step of "
                f"{len(self.rows)} clients: "
                f"{error}; write {'compile' if self.compiled else 'record'}=False"
            ) from error

    def _lay(self, indices: torch.Tensor) -> None:
        """Let each weight lie as its gradient does: a layer's may be turned."""
        losses = self._evaluate(self._plain, indices, self._counts)
        gradients = torch.autograd.grad(
            losses.sum(), list(self._weights.values()), allow_unused=True
        )
        for name, gradient in zip(list(self._weights), gradients, strict=True):
            if gradient is not None:
                self._weights[name] = torch.zeros_like(gradient).requires_grad_()
        self.optimizer = self.losses.work.local.optimizer.over(self._weights)

    def gradient(
        self, indices: torch.Tensor, counts: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Leave the gradients of the mean losses of batches for the optimizer, with `flat` in
        `gradients`; returns the losses, float64, shape ``[count]``, which the next call overwrites.

        Args:
            indices: int64, shape ``[count, width]``.
            counts: how many of each batch count, shape ``[count]``.
            keys: int32, shape ``[count, layers]``.
        """
        self.prepare(indices.shape[1])
        static, run = self._steps[indices.shape[1]]
        static.copy_(indices)
        self._counts.copy_(counts)
        self._keys.copy_(keys)
        run()
        for weight, value in zip(
            self._weights.values(), self._made.get(indices.shape[1], ()), strict=False
        ):
            weight.grad = value
        return self._loss

    def evaluate(self, indices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The mean losses of batches as `gradient` takes them, shape ``[count]``; dropout as the
        model's mode has it."""
        with torch.no_grad():
            return self._evaluate(self._plain, indices, counts)

    def differentiate(
        self, indices: torch.Tensor, counts: torch.Tensor, factors: torch.Tensor
    ) -> torch.Tensor:
        """The gradients of the mean losses of such batches, each times a factor of shape
        ``[count]``: shape ``[count, trained]``; zeros where the factor is 0. Nothing is
        recorded."""
        layout = self.losses.server.layout
        losses = self._evaluate(self._plain, indices, counts)
        total = torch.where(factors > 0, losses * factors, 0.0).sum()
        made = torch.zeros(
            len(self.rows), layout.trained, dtype=layout.dtype, device=self.rows.device
        )
        gradients = torch.autograd.grad(total, list(self._weights.values()), allow_unused=True)
        for place, gradient in zip(layout.parameters, gradients, strict=True):
            if gradient is not None:
                made[:, place.start : place.stop] = gradient.flatten(1)
        return made

    def _evaluate(
        self, call: Callable[..., torch.Tensor], indices: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        losses, samples = self.losses, self.losses.work.samples
        mask = None
        if self.pads:
            mask = (torch.arange(indices.shape[1], device=indices.device) < counts[:, None]).to(
                self.rows.dtype
            )
        keys = {
            f"{name}.key": self._keys[:, place] for place, name in enumerate(losses.noise.names)
        }
        losses.noise.begin()
        with autocast(losses.precision):
            made = call(
                {**self._weights, **self._buffers, **self._integers, **keys},
                samples.take(indices),
                mask,
            )
        losses.noise.end()
        return made
