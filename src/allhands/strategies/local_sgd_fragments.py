"""What workers of `local_sgd` exchange: fragments of the model, and the mean of their changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allhands.comm import all_gather_rows, all_reduce_sum
from allhands.comm.flat_layout import FlatLayout, joined
from allhands.step.exchange import Count
from allhands.world import World


class Fragment:
    """Some consecutive layers, which are exchanged together.

    Attributes:
        names, parameters: its trained parameters.
        offset: it is exchanged after optimizer steps that are `offset` modulo H.
        anchor: the weights after its last exchange, of shape ``[numbers]``, the same on all ranks.
        momentum: of the outer optimizer, likewise; None before its first step.
        residual: what this rank's last delta lost on its way, of shape ``[numbers]``; None where
            nothing was lost.
        owed: likewise of this rank's part of the last mean; see `allhands.comm.coded_sum.exchange`.
        seen: samples (or what the loss counts) that this rank has trained on since the last
            exchange.
        alike: all ranks hold the same weights now.
        mean: the mean of all ranks' deltas, which is on its way, of shape ``[numbers]``; None
            between two exchanges.
        due: the optimizer step after which the outer optimizer applies `mean`.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], offset: int) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._layout = FlatLayout(dict(named))
        self.offset = offset
        double = any(parameter.dtype == torch.float64 for parameter in self.parameters)
        self.dtype = torch.float64 if double else torch.float32
        self.anchor = self.read()
        self.momentum: torch.Tensor | None = None
        self.residual: torch.Tensor | None = None
        self.owed: torch.Tensor | None = None
        self._seen: Count = 0.0
        self.alike = True
        self.mean: torch.Tensor | None = None
        self.due = 0
        self._work: Any = None

    @property
    def seen(self) -> float:
        seen = float(self._seen)
        self._seen = seen
        return seen

    @seen.setter
    def seen(self, value: float) -> None:
        self._seen = value

    def count(self, own: Count) -> None:
        """Add to `seen`, without waiting for the device."""
        self._seen = self._seen + own

    def read(self) -> torch.Tensor:
        """A copy of the present weights as one vector."""
        return joined(self.parameters, self.dtype)

    def write(self, values: torch.Tensor) -> None:
        """Make a vector the present weights."""
        self._layout.write(values, self.parameters)

    def by_name(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a vector by the names of the parameters, in their shapes; views of it."""
        return self._layout.named(values)

    def joined(self, given: dict[str, torch.Tensor], default: torch.Tensor) -> torch.Tensor:
        """The vector of what is given by name; names that are missing have their part of
        `default`."""
        parts = self.by_name(default)
        return torch.cat(
            [given.get(name, part).reshape(-1).to(default) for name, part in parts.items()]
        )

    def begin_mean(self, delta: torch.Tensor, due: int, world: World) -> int:
        """Send this rank's delta, and let the mean of all arrive beside what comes next; the bytes
        that this rank sends."""
        self.mean, self.due = delta.mul_(_own_share([self.seen], world)[0]), due
        if world.world_size == 1:
            return 0
        self._work = dist.all_reduce(delta, async_op=True)
        return _bytes_sent([delta], world)

    def arrived(self) -> torch.Tensor:
        """The mean that is on its way, which is waited for."""
        assert self.mean is not None
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return self.mean


def layers_of(model: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """The trained parameters, those of one module together, in the order in which the model holds
    them."""
    layers: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(name.rpartition(".")[0], []).append((name, parameter))
    return list(layers.values())


def offsets_of(count: int, every: int) -> list[int]:
    """Of each of `count` fragments, after which steps modulo `every` it is exchanged."""
    return [(number + 1) * every // count % every for number in range(count)]


def cut_in_fragments(
    layers: Sequence[Sequence[tuple[str, nn.Parameter]]], count: int, every: int
) -> list[Fragment]:
    """Consecutive layers in `count` fragments, the largest as small as can be, whose exchanges are
    spread over `every` steps."""
    sizes = [sum(parameter.numel() for _, parameter in layer) for layer in layers]
    before = list(itertools.accumulate(sizes, initial=0))
    # By number of first layers: how large the largest fragment must be when they are cut into as
    # many as there were rounds, and where the last of them begins.
    largest, cuts = [math.inf, *before[1:]], []
    for _ in range(count - 1):
        tried = [
            [max(largest[start], before[end] - before[start]) for start in range(end)]
            for end in range(len(before))
        ]
        cuts.append([row.index(min(row)) if row else 0 for row in tried])
        largest = [min(row, default=math.inf) for row in tried]
    bounds = [len(layers)]
    for starts in reversed(cuts):
        bounds.insert(0, starts[bounds[0]])
    fragments = []
    pieces = itertools.pairwise([0, *bounds])
    for (first, end), offset in zip(pieces, offsets_of(count, every), strict=True):
        named = [pair for layer in layers[first:end] for pair in layer]
        fragments.append(Fragment(named, offset))
    return fragments


def shares(counts: Sequence[float], world: World) -> torch.Tensor:
    """Each rank's part of the samples, float64 of shape ``[world_size, len(counts)]``; equal parts
    of what nobody has seen."""
    own = torch.tensor([list(counts)], dtype=torch.float64, device=world.device)
    rows = torch.cat(all_gather_rows(own, world)).cpu()
    total = rows.sum(0)
    return torch.where(total > 0, rows / total, 1 / world.world_size)


def weighted_mean(values: Sequence[torch.Tensor], counts: Sequence[float], world: World) -> int:
    """Replace vectors by their mean over the ranks, weighted by samples, in place; the bytes that
    this rank has sent.

    Bytes are those of a ring: 2 (N - 1) / N of the vectors' own for the sum, N - 1 times the
    counts.
    """
    for value, part in zip(values, _own_share(counts, world), strict=True):
        value.mul_(part)
    all_reduce_sum(values, world)
    return _bytes_sent(values, world)


def _own_share(counts: Sequence[float], world: World) -> list[float]:
    own: list[float] = shares(counts, world)[world.rank].tolist()
    return own


def _bytes_sent(values: Sequence[torch.Tensor], world: World) -> int:
    size = world.world_size
    # The gathering tells the number of rows first, as 8 bytes.
    return 2 * (size - 1) * sum(value.nbytes for value in values) // size + (size - 1) * 8 * (
        1 + len(values)
    )
