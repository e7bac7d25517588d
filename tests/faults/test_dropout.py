"""Noise that is the same on every rank, in every step or in every epoch.

Kinds of fault: Lightning-AI/pytorch-lightning#16166, facebookresearch/detr#297.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.faults.probes import Found, probe, size, train

pytestmark = pytest.mark.serial


class Masks(nn.Module):
    """Keeps the dropout masks that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.drawn: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.functional.dropout(torch.ones(64), 0.5, self.training)
        self.drawn.append(mask.tolist())
        return (x[:, None] * self.scale * mask).sum(1)


def masks(**options: int) -> list[list[float]]:
    torch.default_generator.manual_seed(0)  # as scripts do, on every rank alike
    model, x = Masks(), torch.ones(4 * size())
    train(model, (x, x), 1, lr=0.0, epochs=2, **options)
    return model.drawn


@probe
def dropout() -> list[list[list[float]]]:
    return [masks(), masks(), masks(accumulate=2), masks(seed=1)]


def test_dropout_differs_between_ranks_steps_and_epochs_and_repeats_with_the_run(
    found: Found,
) -> None:
    ranks = found(dropout)
    for run in (0, 2, 3):
        drawn = [tuple(mask) for rank in ranks for mask in rank[run]]
        assert len(set(drawn)) == len(drawn) == 8 * found.workers
    for rank in ranks:
        assert rank[0] == rank[1]
        assert rank[0] != rank[3]
