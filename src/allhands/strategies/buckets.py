"""Gradients added up over the ranks in buckets, each as soon as the backward pass has made all of
its.

The layout is fixed by the order of the parameters, and every operation is in order with a stream,
so that a CUDA graph can capture the exchange. An eager step and a captured one ask for the same
collectives in the same order, so that ranks need not agree on which of them captures. The model
itself is not wrapped: any part of it may be called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allhands.comm.flat_layout import FlatLayout
from allhands.comm.host_sum import HostSum
from allhands.errors import UserError
from allhands.world import World
from allhands.world.abort import aborted_error, aborted_group

CAP_MB = 25.0
_FIRST_MB = 1.0  # the first bucket is small, so that the exchange begins early


class Buckets:
    """The gradients of some parameters, in flat buffers that are exchanged one after another.

    Parameters are laid out from the last to the first, which is about the order in which a backward
    pass makes their gradients. After a step, ``parameter.grad`` is a view of its buffer. A gradient
    that some ranks have not made counts as zero there. One that no rank has made stays None, so
    that the optimizer leaves the parameter alone, as it does in one process.

    Args:
        named: parameters with dense gradients, and their names; the same on all ranks.
        world: the ranks; their number is at least 2.
        cap_mb: size of a bucket in MB (2**20 bytes).
        add_up: adds a bucket up over the ranks in place, in order with the current stream; None: by
            one all-reduce.
        small: adds up buckets that are small enough for it, in the place of an all-reduce.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        world: World,
        cap_mb: float = CAP_MB,
        add_up: Callable[[Bucket], None] | None = None,
        small: HostSum | None = None,
    ) -> None:
        parameters = [parameter for _, parameter in named]
        self._names = {id(parameter): name for name, parameter in named}
        self._add_up, self._small = add_up, small
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._buckets = [Bucket(group) for group in _grouped(parameters, cap_mb)]
        if self._buckets:
            self._buckets[-1].is_last = True
        self._of = {
            id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters
        }
        self._works: list[Any] = []
        self._exchanging = True
        self._launched = 0
        self._is_aborted = aborted_group()
        # A training that fails leaves its parameters to the next one.
        made = weakref.WeakMethod(self._on_gradient)

        def hook(parameter: torch.Tensor) -> None:
            note = made()
            if note is not None:
                note(parameter)

        self._hooks = [
            parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters
        ]

    @contextmanager
    def kept_back(self) -> Iterator[None]:
        """Backward passes within add their gradients up on this rank alone."""
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = True

    def finish(self) -> None:
        """After the last backward pass of a step: order the exchange before what comes next on the
        current stream."""
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket)
        self._launched = 0
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        for bucket in self._buckets:
            bucket.reset()

    def spoil(self) -> None:
        """Take part in the exchange of a step with gradients that are all NaN."""
        for bucket in self._buckets[self._launched :]:
            for parameter in bucket.parameters:
                parameter.grad = torch.full_like(parameter, float("nan"))
            self._launch(bucket)
        self.finish()

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._is_aborted is not None and self._is_aborted():
            raise aborted_error()
        if not self._exchanging:
            return
        bucket = self._of[id(parameter)]
        if bucket.is_launched:
            raise UserError(
                f"the gradient of '{self._names[id(parameter)]}' was made again after it was "
                "exchanged in the same step: the layer is computed again by a reentrant "
                "checkpoint, or backward() is called twice, or outside of loop.step. Write "
                "torch.utils.checkpoint.checkpoint(…, use_reentrant=False), and add losses up "
                "before one backward(); in a loop of your own, call loop.step(loss_of, batch)"
            )
        bucket.waiting.discard(id(parameter))
        # In the order of the buckets, which is the same on all ranks; gradients of one rank may be
        # made in another order.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].waiting:
            self._launch(self._buckets[self._launched])

    def _launch(self, bucket: Bucket) -> None:
        self._launched += 1
        bucket.collect()
        if self._stream is None:
            if self._add_up is not None:
                self._add_up(bucket)
            elif self._small is not None and self._small.takes(bucket.flat):
                self._small.add_up(bucket.flat)
            else:
                self._works.append(dist.all_reduce(bucket.flat, async_op=True))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            if self._add_up is None:
                dist.all_reduce(bucket.flat)
            else:
                self._add_up(bucket)


class Bucket:
    """Parameters of one dtype, and the buffer of their gradients.

    Attributes:
        flat: what is added up: the gradients, and after them a number for each parameter, 1 where
            this rank has made its gradient.
        gradients: the first part of `flat`.
        is_last: no bucket of the step comes after it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.is_last = self.is_launched = False
        self._all = {id(parameter) for parameter in parameters}
        self.waiting = set(self._all)
        first = parameters[0]
        # In the parameters' own memory formats, in which autograd makes gradients: copying is then
        # one kernel for all.
        layout = FlatLayout(
            {str(number): one for number, one in enumerate(parameters)}, strided=True
        )
        size = layout.length
        self.flat = torch.zeros(size + len(parameters), dtype=first.dtype, device=first.device)
        self.gradients, self._used = self.flat[:size], self.flat[size:]
        self._missing: list[int] = []
        self.views = layout.views(self.flat)

    @torch.no_grad()
    def collect(self) -> None:
        """Bring the gradients into the buffer; the parameters have views of it afterwards."""
        self.is_launched = True
        self._used.fill_(1)
        pairs = [(view, p.grad) for view, p in zip(self.views, self.parameters, strict=True)]
        made = [
            (view, g.to_dense() if g.is_sparse else g)
            for view, g in pairs
            if g is not None and g is not view
        ]
        if made:
            torch._foreach_copy_([view for view, _ in made], [gradient for _, gradient in made])
        self._missing = [number for number, (_, gradient) in enumerate(pairs) if gradient is None]
        for number in self._missing:
            self.views[number].zero_()
            self._used[number] = 0
        for view, parameter in zip(self.views, self.parameters, strict=True):
            parameter.grad = view

    @property
    def missing(self) -> list[nn.Parameter]:
        """The parameters whose gradients this rank has not made in the step that is being
        exchanged."""
        return [self.parameters[number] for number in self._missing]

    def reset(self) -> None:
        """After the exchange: take away what no rank has made. Waits for the device where this rank
        has not made all."""
        if self._missing:
            used = self._used.tolist()
            for number in self._missing:
                if not used[number]:
                    self.parameters[number].grad = None
            self._missing = []
        self.is_launched = False
        self.waiting = set(self._all)


def _grouped(parameters: Sequence[nn.Parameter], cap_mb: float) -> list[list[nn.Parameter]]:
    """The parameters from the last to the first, cut where a bucket is full; each bucket has one
    dtype."""
    groups: list[list[nn.Parameter]] = []
    open_groups: dict[torch.dtype, tuple[list[nn.Parameter], float]] = {}
    for parameter in reversed(parameters):
        group, size = open_groups.pop(parameter.dtype, ([], 0.0))
        if not group:
            groups.append(group)
        group.append(parameter)
        size += parameter.numel() * parameter.element_size() / 2**20
        if size < (min(_FIRST_MB, cap_mb) if group is groups[0] else cap_mb):
            open_groups[parameter.dtype] = group, size
    return groups
