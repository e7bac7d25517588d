"""How well items are ranked, a sample a row: outputs and targets of shape ``[samples, items]``.

A target says how relevant an item is, 0 not at all. Each is a mean over the samples, at the `k`
items with the largest outputs; a sample without a relevant item gives 0.
"""

from __future__ import annotations

import torch


def hitrate(output: torch.Tensor, target: torch.Tensor, k: int) -> torch.Tensor:
    """The share of the relevant items that are among the first."""
    return _mean(_ranked(output, target)[:, :k].sum(1), target.sum(1))


def mrr(output: torch.Tensor, target: torch.Tensor, k: int) -> torch.Tensor:
    """One over the place of the first relevant item."""
    found, places = _ranked(output, target)[:, :k].max(dim=1)
    return _mean((found > 0).to(output.dtype), places + 1)


def average_precision(output: torch.Tensor, target: torch.Tensor, k: int) -> torch.Tensor:
    """The mean over the relevant items among the first of the precision down to each."""
    first = _ranked(output, target)[:, :k]
    precision = first.cumsum(1) / torch.arange(1, first.shape[1] + 1, device=first.device)
    return _mean((precision * first).sum(1), (first > 0).sum(1))


def ndcg(output: torch.Tensor, target: torch.Tensor, k: int) -> torch.Tensor:
    """The discounted gain of the first, relative to that of the best order."""

    def gain(ranked: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ranked.shape[1], device=ranked.device)
        return ((2**ranked - 1) / torch.log2(places + 2.0))[:, :k].sum(1)

    return _mean(gain(_ranked(output, target)), gain(_ranked(target, target)))


def _ranked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The targets in the order of the outputs, largest first."""
    return target.to(torch.float32).gather(1, output.argsort(dim=1, descending=True))


def _mean(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    return torch.where(below > 0, above / below, 0.0).mean()
