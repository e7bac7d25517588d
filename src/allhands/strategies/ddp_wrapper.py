"""The model inside torch.nn.parallel.DistributedDataParallel, as this package uses it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allhands.errors import UserError

# Buffers are made equal when it matters (sync_buffers); a broadcast in every forward pass would let rank 0's BatchNorm
# statistics overwrite those of the others. PyTorch 2.13 renamed the argument.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS_IN_FORWARD: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def wrap(model: nn.Module, device: torch.device, cap_mb: float | None, mean: Callable[[dist.GradBucket], None] | None,
         into: nn.Module | None, **options: Any) -> DistributedDataParallel:  # fmt: skip
    """The model in a wrapper that exchanges its gradients.

    Args:
        cap_mb: size of a bucket in MB; None keeps PyTorch's default.
        mean: replaces the gradients in a bucket by their mean over the ranks, in order with the current stream; None leaves that
            to PyTorch.
        into: the wrapper to make anew, since somebody holds it already.
        options: further ones of `DistributedDataParallel`.
    """
    wrapped = into if isinstance(into, DistributedDataParallel) else DistributedDataParallel.__new__(DistributedDataParallel)
    if cap_mb is not None:
        options["bucket_cap_mb"] = cap_mb
    with _without_buffers(model):
        DistributedDataParallel.__init__(
            wrapped,
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            **_NO_BUFFERS_IN_FORWARD,
            gradient_as_bucket_view=True,
            **options,
        )
    if mean is not None:
        hook = _Hook(mean, device)
        # PyTorch looks at a hook's annotations, and in a file such as this they are text.
        wrapped.register_comm_hook(None, lambda state, bucket: hook(bucket))
    return wrapped


class _Hook:
    """Has a function exchange the buckets of `DistributedDataParallel`, on a stream beside which the backward pass goes on."""

    def __init__(self, mean: Callable[[dist.GradBucket], None], device: torch.device) -> None:
        self._mean, self._device = mean, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor]
        if self._stream is None:
            future = torch.futures.Future()
            self._mean(bucket)
            future.set_result(bucket.buffer())
            return future
        future = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._mean(bucket)
            future.set_result(bucket.buffer())  # who waits for it waits for this stream
        return future


@contextmanager
def _without_buffers(model: nn.Module) -> Iterator[None]:
    """Within, DistributedDataParallel leaves buffers out: it cannot send those of some dtypes (int16, complex) over gloo."""
    name = "_ddp_params_and_buffers_to_ignore"  # PyTorch's; read once, when the wrapper is made
    before = getattr(model, name, None)
    setattr(model, name, [*(before or ()), *(buffer for buffer, _ in model.named_buffers())])
    try:
        yield
    finally:
        if before is None:
            delattr(model, name)
        else:
            setattr(model, name, before)


class InOrder(nn.Module):
    """Adds its parameters up, times a number, so that their gradients become ready in the given order.

    Those whose id is in `sparse` get sparse gradients, of their first row.
    """

    def __init__(self, parameters: list[nn.Parameter], gradient: float, sparse: set[int]) -> None:
        super().__init__()
        self.gradient = gradient
        self.sparse = sparse
        self.ordered = parameters  # a plain list: they are not this module's own

    def forward(self) -> torch.Tensor:
        total = torch.zeros((), device=self.ordered[0].device)
        # The autograd engine goes back through the last operation first.
        for parameter in reversed(self.ordered):
            value: torch.Tensor = parameter
            if id(parameter) in self.sparse:
                first = torch.zeros(1, dtype=torch.int64, device=parameter.device)
                value = nn.functional.embedding(first, parameter, sparse=True)
            total = total + (value * self.gradient).sum()
        return total


def explained(error: RuntimeError, trained: Sequence[tuple[str, nn.Parameter]], rank: int) -> Exception:
    """What to say when PyTorch has not finished the exchange; its own message gives numbers instead of names."""
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    if found is None:
        return error
    return took_no_part([trained[int(number)] for number in found[1].split()], rank)


def took_no_part(unused: Sequence[tuple[str, nn.Parameter]], rank: int) -> UserError:
    """The error of parameters without a gradient."""
    names = [name for name, _ in unused]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    if any(not parameter.requires_grad for _, parameter in unused):
        return UserError(
            f"these parameters were frozen (requires_grad=False) after the training had begun: {shown}. Freeze them before "
            "train(), or write distributed=DDP(find_unused_parameters=True)"
        )
    return UserError(
        f"on rank {rank} these parameters took no part in the loss (with accumulate: in that of the last micro-batch), so their "
        f"gradients (and others exchanged with them) were not reduced: {shown}. Remove them from the model, set "
        "requires_grad=False, or write distributed=DDP(find_unused_parameters=True)"
    )
