"""Gradients added up over the ranks in buckets, each as soon as the backward pass has made all of its.

What `DistributedDataParallel` does, in a form that a CUDA graph can record: the layout is fixed by the order of the parameters,
nothing is decided or timed on the host, and every operation is in order with a stream. An eager step and a recorded one ask for
the same collectives in the same order, so that ranks need not agree on which of them records.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from allhands.world import World

CAP_MB = 25.0
_FIRST_MB = 1.0  # the first bucket is small, so that the exchange begins early


class Buckets:
    """The gradients of some parameters, in flat buffers that are exchanged one after another.

    Parameters are laid out from the last to the first, which is about the order in which a backward pass makes their gradients.
    After a step, ``parameter.grad`` is a view of its buffer.

    Args:
        parameters: with dense gradients, all of which a step's last backward pass makes; the same on all ranks.
        world: the ranks; their number is at least 2.
        cap_mb: size of a bucket in MB (2**20 bytes).
        add_up: adds a flat buffer up over the ranks in place, in order with the current stream; None: by one all-reduce.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, cap_mb: float = CAP_MB,
                 add_up: Callable[[torch.Tensor], None] | None = None) -> None:  # fmt: skip
        self._add_up = add_up or dist.all_reduce
        self._on_gpu = world.device.type == "cuda"
        self._stream = torch.cuda.Stream(world.device) if self._on_gpu else None
        self._buckets = [_Bucket(group) for group in _grouped(parameters, cap_mb)]
        self._of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._exchanging = True
        self._launched = 0
        made = weakref.WeakMethod(self._made)  # a training that fails leaves its parameters to the next one

        def hook(parameter: torch.Tensor) -> None:
            note = made()
            if note is not None:
                note(parameter)

        self._hooks = [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]

    @contextmanager
    def kept_back(self) -> Iterator[None]:
        """Backward passes within add their gradients up on this rank alone."""
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = True

    def finish(self) -> list[nn.Parameter]:
        """After the last backward pass of a step: order the exchange before what comes next on the current stream.

        Returns:
            Parameters without a gradient; where there are any, the exchange is not complete.
        """
        missing: list[nn.Parameter] = []
        for bucket in self._buckets[self._launched :]:  # with micro-batches, an earlier one may have made what the last did not
            missing += [parameter for parameter in bucket.parameters if parameter.grad is None]
            if not missing:
                self._launch(bucket)
        self._launched = 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return missing

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

    def _made(self, parameter: torch.Tensor) -> None:
        if not self._exchanging:
            return
        self._of[id(parameter)].waiting -= 1
        # In the order of the buckets, which is the same on all ranks; gradients of one rank may be made in another order.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].waiting:
            self._launch(self._buckets[self._launched])

    def _launch(self, bucket: _Bucket) -> None:
        self._launched += 1
        bucket.collect()
        if self._stream is None:
            self._add_up(bucket.flat)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._add_up(bucket.flat)


class _Bucket:
    """Parameters of one dtype, and the buffer of their gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.waiting = len(parameters)
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.views: list[torch.Tensor] = []
        begin = 0
        for parameter in parameters:
            # In the parameter's own memory format, in which autograd makes gradients: copying is then one kernel for all.
            strides = torch.empty_like(parameter, device="meta").stride()
            view = self.flat.as_strided(parameter.shape, strides, begin)
            self.views.append(view)
            begin += parameter.numel()

    @torch.no_grad()
    def collect(self) -> None:
        """Bring the gradients into the buffer; the parameters have views of it afterwards."""
        pairs = zip(self.views, self.parameters, strict=True)
        made = [(view, p.grad) for view, p in pairs if p.grad is not None and p.grad is not view]
        if made:
            torch._foreach_copy_([view for view, _ in made], [gradient for _, gradient in made])
        for view, parameter in zip(self.views, self.parameters, strict=True):
            parameter.grad = view


def _grouped(parameters: Sequence[nn.Parameter], cap_mb: float) -> list[list[nn.Parameter]]:
    """The parameters from the last to the first, cut where a bucket is full; each bucket has one dtype."""
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
