"""Aggregations that a few wrong clients cannot spoil. They need every update, not only their
sum."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
import torch.distributed as dist

from allhands.checks import check_whole
from allhands.errors import UserError
from allhands.federated.algorithms.base import Algorithm, Server, Trained, fraction
from allhands.federated.sums import Sums
from allhands.world import World

_BLOCK = 1 << 14  # numbers at a time, of all clients; a rank's part is a number of blocks


class Robust(Algorithm):
    """Every rank keeps its clients' updates; after the round each gets one part of the numbers of
    all of them, and the parts of the result are put together. No rank holds all updates. Every
    client counts the same.

    Args:
        average_buffers: combine BatchNorm's statistics by the same rule; without, a model that has
            some is refused.
    """

    def __init__(self, average_buffers: bool = False) -> None:
        self.average_buffers = average_buffers
        self._kept: dict[int, torch.Tensor] = {}

    def vectors(self, server: Server) -> dict[str, int]:
        return {}

    def figures(self) -> tuple[str, ...]:
        return ("rank",)

    def contribute(self, trained: Trained, server: Server, sums: Sums) -> None:
        assert server.world is not None
        for slot, update in zip(trained.slots, trained.updates, strict=True):
            self._kept[slot] = update
        sums.note(trained.slots, rank=float(server.world.rank))

    def aggregate(self, server: Server, sums: Sums) -> None:
        assert server.world is not None
        figures, world = sums.figures(), server.world
        ranks = {
            slot: int(figures["rank"][slot]) for slot in figures["ok"].nonzero().flatten().tolist()
        }
        own = [self._kept[slot] for slot in sorted(self._kept)]
        self._kept = {}
        part = _exchange(own, ranks, server, world)
        combined = torch.zeros(part.shape[1], dtype=torch.float64, device=part.device)
        self.combine(part, combined, world)
        server.weights.add_(_gather(combined, world)[: server.layout.length])

    @abstractmethod
    def combine(self, updates: torch.Tensor, combined: torch.Tensor, world: World) -> None:
        """Combine the cohort's updates, number by number, in a way that does not depend on how
        numbers are dealt to ranks.

        Args:
            updates: this rank's part of the numbers, shape ``[cohort, part]``, in the order of the
                cohort; numbers behind the end of a row are 0.
            combined: to fill, float64, shape ``[part]``.
            world: the ranks.
        """


class Median(Robust):
    """The coordinate-wise median of the updates (Yin et al., Byzantine-Robust Distributed Learning:
    Towards Optimal Statistical Rates, ICML 2018, algorithm 1, option I); of an even number, the
    mean of the two in the middle.

    Args:
        average_buffers: take the median of BatchNorm's statistics too; without, a model that has
            some is refused.
    """

    name = "median"

    def combine(self, updates: torch.Tensor, combined: torch.Tensor, world: World) -> None:
        low, high = (len(updates) - 1) // 2, len(updates) // 2
        for block, target in zip(updates.split(_BLOCK, 1), combined.split(_BLOCK), strict=True):
            ordered = block.sort(0).values.double()
            target.copy_((ordered[low] + ordered[high]) / 2)


class TrimmedMean(Robust):
    """The coordinate-wise mean without the largest and the smallest updates (Yin et al. 2018,
    algorithm 1, option II).

    Args:
        beta: the part that is left out at each end, at least 0 and below 0.5; of K clients,
            ``floor(beta * K)`` at each end. 0 is FedAvg with ``weighted=False``.
        average_buffers: see `Median`.
    """

    name = "trimmed_mean"

    def __init__(self, beta: float = 0.1, average_buffers: bool = False) -> None:
        super().__init__(average_buffers)
        self.beta = fraction("beta", beta, high=0.5)
        if self.beta == 0.5:
            raise UserError(
                f"beta={beta!r} leaves out everyone; write less than 0.5, or algorithm='median'"
            )

    def check(self, server: Server, per_round: int) -> None:
        if self.beta and not self._trimmed(per_round):
            raise UserError(
                f"beta={self.beta:g} of {per_round} clients a round leaves out none; write a "
                "larger beta, below 0.5, or 0 for the plain mean"
            )

    def _trimmed(self, clients: int) -> int:
        return math.floor(self.beta * clients + 1e-9)  # 0.1 * 30 is to be 3

    def combine(self, updates: torch.Tensor, combined: torch.Tensor, world: World) -> None:
        cut = self._trimmed(len(updates))
        kept = range(cut, len(updates) - cut)
        for block, target in zip(updates.split(_BLOCK, 1), combined.split(_BLOCK), strict=True):
            ordered = block.sort(0).values
            for row in kept:  # one after another: a sum in one fixed order
                target.add_(ordered[row])
        combined /= len(kept)


class Krum(Robust):
    """The update that is nearest to its neighbours, or the mean of some of those (Blanchard et al.,
    Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017).

    A client's score is the sum of its squared distances to the ``K - byzantine - 2`` nearest others
    of K; the lowest scores win, of equal ones the first in the cohort.

    Args:
        byzantine: how many clients of a round may be wrong; it needs ``K >= 2 * byzantine + 3``.
        select: how many updates are averaged: 1 for Krum, more for multi-Krum, at most ``K -
            byzantine``.
        average_buffers: take BatchNorm's statistics of the same clients, which then count in the
            distances; without, a model that has some is refused.
    """

    name = "krum"

    def __init__(self, byzantine: int = 1, select: int = 1, average_buffers: bool = False) -> None:
        super().__init__(average_buffers)
        for name, value, least in (("byzantine", byzantine, 0), ("select", select, 1)):
            check_whole(name, value, least)
        self.byzantine, self.chosen = byzantine, select
        self._length = 0
        #: Places in the cohort of those whose updates were taken in the last round, best first,
        #: among those that have trained.
        self.taken: list[int] = []

    def check(self, server: Server, per_round: int) -> None:
        if per_round < 2 * self.byzantine + 3:
            mend = f"byzantine={(per_round - 3) // 2}" if per_round >= 3 else "algorithm='median'"
            raise UserError(
                f"algorithm='krum' with byzantine={self.byzantine} needs at least "
                f"{2 * self.byzantine + 3} clients a round, and there are {per_round}; write {mend}"
            )
        if self.chosen > per_round - self.byzantine:
            raise UserError(
                f"select={self.chosen} of {per_round} clients, {self.byzantine} of them perhaps "
                f"wrong; write at most select={per_round - self.byzantine}"
            )

    def begin(self, server: Server) -> None:
        self._length = server.layout.length

    def combine(self, updates: torch.Tensor, combined: torch.Tensor, world: World) -> None:
        scores = self._scores(_distances(updates, self._length, world))
        self.taken = sorted(range(len(scores)), key=lambda row: (scores[row], row))[: self.chosen]
        for row in sorted(self.taken):
            combined += updates[row]
        combined /= len(self.taken)

    def _scores(self, distances: torch.Tensor) -> list[float]:
        others = len(distances) - 1
        # Where clients have failed.
        nearest = max(min(len(distances) - self.byzantine - 2, others), min(1, others))
        ordered = distances.clone().fill_diagonal_(float("inf")).sort(1).values[:, :nearest]
        return [math.fsum(row) for row in ordered.tolist()]


def _distances(updates: torch.Tensor, length: int, world: World) -> torch.Tensor:
    """Squared distances between whole updates of which this rank has some blocks: float64, shape
    ``[cohort, cohort]``, on the processor. Each block is summed alone and blocks in their order,
    which is the same on any number of ranks.

    Args:
        updates: shape ``[cohort, blocks * _BLOCK]``.
        length: of a whole update.
        world: the ranks.
    """
    cohort, blocks = len(updates), updates.split(_BLOCK, 1)
    # Places for the blocks of all ranks; what is added by the others is 0.
    parts = torch.zeros(
        len(blocks) * world.world_size, cohort, cohort, dtype=torch.float64, device=updates.device
    )
    for place, block in enumerate(blocks):
        numbers = block.to(torch.float64)
        for row in range(cohort - 1):
            parts[world.rank * len(blocks) + place, row, row + 1 :] = (
                (numbers[row + 1 :] - numbers[row]).square_().sum(1)
            )
    if world.world_size > 1:
        dist.all_reduce(parts)
    distances = torch.zeros(cohort, cohort, dtype=torch.float64)
    for part in parts[: -(-length // _BLOCK)].cpu():
        distances += part
    return distances + distances.T


def _exchange(
    own: list[torch.Tensor], ranks: dict[int, int], server: Server, world: World
) -> torch.Tensor:
    """This rank's part of the numbers of all updates: shape ``[cohort, part]``, in the order of the
    cohort.

    Args:
        own: this rank's updates, by slot.
        ranks: slot to the rank that holds its update.
        server: length and type of updates.
        world: the ranks.
    """
    size, length, dtype = world.world_size, server.layout.length, server.layout.dtype
    part = -(-length // (size * _BLOCK)) * _BLOCK
    rows = torch.zeros(len(own), part * size, dtype=dtype, device=server.device)
    for row, update in zip(rows, own, strict=True):
        row[:length] = update
    if size == 1:
        return rows
    sent = rows.view(len(own), size, part).transpose(0, 1).contiguous()
    counts = [sum(rank == holder for holder in ranks.values()) for rank in range(size)]
    received = torch.empty(sum(counts), part, dtype=dtype, device=server.device)
    dist.all_to_all_single(
        received.view(-1),
        sent.view(-1),
        [count * part for count in counts],
        [len(own) * part] * size,
    )
    arrived = [slot for rank in range(size) for slot in sorted(ranks) if ranks[slot] == rank]
    return received[torch.tensor(arrived).argsort().to(server.device)]


def _gather(part: torch.Tensor, world: World) -> torch.Tensor:
    """All ranks' parts, one behind the other."""
    if world.world_size == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(world.world_size)]
    dist.all_gather(parts, part)
    return torch.cat(parts)
