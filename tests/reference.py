"""The hand-written single-process loop that every strategy must reproduce. Plain PyTorch, nothing
of the step's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from allhands.data import global_order


def global_batches(
    num_samples: int, size: int, seed: int, shuffle: bool = True, drop_last: bool = False
) -> Iterator[torch.Tensor]:
    """The sample indices of one optimizer step after another, epoch after epoch."""
    epoch = 0
    while True:
        order = global_order(num_samples, seed, epoch) if shuffle else torch.arange(num_samples)
        for batch in order.split(size):
            if len(batch) == size or not drop_last:
                yield batch
        epoch += 1


def train_by_hand(
    model: nn.Module,
    criterion: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    tensors: tuple[torch.Tensor, torch.Tensor],
    batches: Iterator[torch.Tensor],
    steps: int,
    clip_norm: float | None = None,
    after_step: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Train on whole global batches at once; returns the loss of each step."""
    losses = []
    model.train()
    for _ in range(steps):
        rows = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(tensors[0][rows]), tensors[1][rows])
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        after_step()
        losses.append(loss.item())
    return losses


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of any parameter, relative to that parameter's largest value."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[k].double() - theirs[k].double()).abs().max() / theirs[k].double().abs().max())
        for k in ours
    )


class Slope(nn.Module):
    """One weight, 0 at first: with ``loss = mean(w * x)`` and SGD(lr=1), -w after one step is the
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def drift(ours: nn.Module, theirs: nn.Module, start: nn.Module) -> float:
    """How far apart two trained models are, in parts of the way that the second has gone from
    `start`; over all weights at once."""
    ends = ours.state_dict(), theirs.state_dict(), start.state_dict()
    a, b, c = (torch.cat([t.double().cpu().flatten() for t in end.values()]) for end in ends)
    return float((a - b).norm() / (b - c).norm())


def mean_output(output: torch.Tensor, target: Any) -> torch.Tensor:
    """A criterion that is the mean of the output."""
    return output.mean()
