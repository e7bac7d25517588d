"""The sum over a cohort, one number for number the same in whatever order and on however many
devices it is taken.

Floating-point addition depends on the order, and which client is trained where, and finishes when,
differs from run to run. So each client's contribution is first rounded to a multiple of 2**-44 in
float64; sums of such multiples are exact as long as they stay below 2**9, so that any order gives
the same bits (the idea of pre-rounding: Demmel and Nguyen, Fast Reproducible Floating-Point
Summation, 2013). Contributions are shares of a mean, so that in a training that has not diverged
they do stay below; larger ones are still summed in float64, only no longer bit for bit repeatably.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from allhands.world import World

_GRID = 1.5 * 2.0 ** (52 - 44)  # adding it and taking it away rounds to multiples of 2**-44
_BLOCK = 1 << 16  # numbers at a time on a processor: what is rounded stays in the cache


class Sums:
    """Weighted sums of clients' vectors and one row of figures a client, summed over all ranks by
    one message.

    Args:
        lengths: length of each vector, by name.
        slots: clients in the cohort.
        figures: names of the figures of a client.
        scale: every weight is multiplied by it, so that the weights of a cohort come to about 1.
        device: where vectors lie.
    """

    def __init__(
        self,
        lengths: dict[str, int],
        slots: int,
        figures: Sequence[str],
        scale: float,
        device: torch.device,
    ) -> None:
        self.names = list(figures)
        self.scale = scale
        #: The weight of a client where all of the cohort count the same: times `scale`, it is 1 /
        #: slots.
        self.share = 1.0 / (scale * slots)
        self._column = {name: i for i, name in enumerate(figures)}
        # One tensor, so that one all-reduce carries everything.
        self._all = torch.zeros(
            sum(lengths.values()) + len(lengths) + slots * len(figures),
            dtype=torch.float64,
            device=device,
        )
        self._vectors, at = {}, 0
        for name, length in lengths.items():
            self._vectors[name] = self._all[at : at + length]
            at += length
        self._weights = {name: self._all[at + i : at + i + 1] for i, name in enumerate(lengths)}
        self._figures = self._all[at + len(lengths) :].view(slots, len(figures))

    def add(self, name: str, rows: torch.Tensor, weights: torch.Tensor) -> None:
        """Add ``weights[i] * rows[i]`` for each client of a chunk.

        Args:
            name: which vector.
            rows: shape ``[clients, length]``; left as it is.
            weights: float64, shape ``[clients]``.
        """
        total, factors = self._vectors[name], (weights * self.scale).to(rows.device, torch.float64)
        self._weights[name] += _round(factors).sum()
        if rows.device.type != "cpu":
            total += _summed(rows, factors)
            return
        room = torch.empty(min(_BLOCK, len(total)), dtype=torch.float64)
        for row, factor in zip(rows, factors.tolist(), strict=True):
            for part, share in zip(total.split(_BLOCK), row.split(_BLOCK), strict=True):
                part.add_(room[: len(part)].copy_(share).mul_(factor).add_(_GRID).sub_(_GRID))

    def note(self, slots: Sequence[int], **figures: torch.Tensor | float) -> None:
        """Set figures of the clients at `slots` of the cohort, each of shape ``[len(slots)]`` or
        one number for all."""
        device = self._figures.device
        # A copy that is waited for would wait for the training too.
        places = torch.tensor(slots).to(device, non_blocking=True)
        for name, value in figures.items():
            column = torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True)
            self._figures[places, self._column[name]] = column.expand(len(slots))

    def exchange(self, world: World) -> None:
        """Sum over all ranks."""
        if world.world_size > 1:
            dist.all_reduce(self._all)

    def total(self, name: str) -> torch.Tensor:
        """The weighted sum, float64, shape ``[length]``, times `scale`."""
        return self._vectors[name]

    def weight(self, name: str) -> float:
        """The sum of the weights, times `scale`; 0 when nothing was added."""
        return float(self._weights[name])

    def mean(self, name: str) -> torch.Tensor:
        """The weighted mean, float64, shape ``[length]``."""
        return self._vectors[name] / self.weight(name)

    def set_mean(self, name: str, value: torch.Tensor) -> None:
        """Let `mean` give `value`, float64, shape ``[length]``; after `exchange`, on every rank
        alike."""
        self._vectors[name].copy_(value)
        self._weights[name].fill_(1.0)

    def figures(self) -> dict[str, torch.Tensor]:
        """The figures of all clients, in the order of the cohort: float64 on the processor, shape
        ``[slots]`` each."""
        table = self._figures.cpu()
        return {name: table[:, column] for name, column in self._column.items()}


def _round(values: torch.Tensor) -> torch.Tensor:
    return values.add(_GRID).sub_(_GRID)


def _summed(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The sum of `factors` (float64) times `rows`, each number rounded to a multiple of 2**-44: in
    units of which rounding is one pass over the memory and not two, and so is the conversion of
    `rows`."""
    return torch.mul(rows, (factors * 2.0**44)[:, None]).round_().sum(0).mul_(2.0**-44)
