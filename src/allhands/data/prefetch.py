"""Batches on their way to a GPU while the step before them runs.

The micro-batches of the next step are read from the feed and copied from pinned memory, on a stream
beside that of the training, before those of the present step are handed out. What the training gets
lies on its device, in the order and with the errors of the feed: one that reading the next step has
raised comes when the next step is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from allhands.data.trees import map_tensors

StepBatch = tuple[Sequence[Any], Sequence[int], int, bool]


class Transfer(Protocol):
    """How micro-batches get to a device."""

    def send(self, batches: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Begin to copy them; returns the copies, not to be used before `receive`, and what
        `receive` needs."""

    def receive(self, ticket: Any) -> None:
        """Let what is queued from now on use the copies."""


class SideStream:
    """Copies on a CUDA stream of their own, out of pinned memory.

    Tensors on a GPU, sparse ones, and what is no tensor are handed on as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, batches: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        copies: list[torch.Tensor] = []

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if not is_copied(tensor):
                return tensor
            if tensor.is_pinned():
                pinned = tensor
            else:
                pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
            copies.append(pinned.to(self._device, non_blocking=True))
            return copies[-1]

        with torch.cuda.stream(self._stream):
            moved = map_tensors(batches, copy)
            done = torch.cuda.Event()
            done.record()
        return moved, (copies, done)

    def receive(self, ticket: Any) -> None:
        copies, done = ticket
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(done)
        for tensor in copies:
            # Its memory is the side stream's, which must not use it again too early.
            tensor.record_stream(stream)


def is_copied(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a batch is one that can be pinned and copied."""
    plain = (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and type(tensor) is torch.Tensor
    )
    return plain and not tensor.requires_grad


def ahead(steps: Iterator[StepBatch], device: torch.device) -> Iterator[StepBatch]:
    """The same steps; on CUDA each step's micro-batches are on the device, and were sent there a
    step earlier."""
    return steps if device.type != "cuda" else sent_ahead(steps, SideStream(device))


@dataclass
class _Failed:
    error: Exception


def sent_ahead(steps: Iterator[StepBatch], transfer: Transfer) -> Iterator[StepBatch]:
    """The same steps, each sent when the one before it is handed out."""

    def receive(sent: Any) -> StepBatch:
        (batches, ticket), rest = sent
        transfer.receive(ticket)
        return batches, *rest

    return a_step_ahead(steps, lambda step: (transfer.send(step[0]), step[1:]), receive)


def a_step_ahead(
    steps: Iterator[StepBatch], send: Callable[[StepBatch], Any], receive: Callable[[Any], Any]
) -> Iterator[Any]:
    """What `receive` makes of what `send` gave of each step, which is called when the step before
    it is handed out."""

    def send_next() -> Any:
        try:
            step = next(steps, None)
            return None if step is None else send(step)
        except Exception as error:
            return _Failed(error)

    try:
        following = send_next()
        while following is not None:
            if isinstance(following, _Failed):
                raise following.error
            sent, following = following, send_next()
            yield receive(sent)
    finally:
        close = getattr(steps, "close", None)
        if close is not None:
            close()
