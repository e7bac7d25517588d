"""The model that clients begin with, measured before they train it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """The model without dropout and with BatchNorm's statistics as they are; afterwards as it is
    trained."""
    model.eval()
    for module in model.modules():
        # For an RNN without dropout it is the same, and cuDNN has no backward pass for one that is
        # not in training.
        if isinstance(module, nn.RNNBase) and module.dropout == 0:
            module.train()
    try:
        yield
    finally:
        model.train()


def in_parts(
    held: Sequence[torch.Tensor], width: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The samples of several clients, so many of each at a time.

    Args:
        held: each client's samples, int64, on the processor.
        width: of a part.
        device: where parts are wanted.

    Yields:
        Indices, shape ``[clients, width or what is left of the longest]``, and how many of each row
        count: float64, shape ``[clients]``, 0 for a client whose samples are through. What does not
        count repeats the client's first sample.
    """
    longest = max(map(len, held))
    for begin in range(0, longest, width):
        parts = [samples[begin : begin + width] for samples in held]
        size = min(width, longest - begin)
        indices = torch.stack(
            [
                torch.cat([part, samples[:1].expand(size - len(part))])
                for part, samples in zip(parts, held, strict=True)
            ]
        )
        yield (
            indices.to(device),
            torch.tensor([float(len(part)) for part in parts], dtype=torch.float64).to(device),
        )
