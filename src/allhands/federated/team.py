"""Ranks that train a client together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from allhands.errors import UserError
from allhands.world import World


@dataclass(frozen=True)
class Team:
    """The team of this rank.

    Attributes:
        number: which of the teams.
        teams: how many there are.
        place: this rank's place in its team; the first one speaks for it.
        size: ranks of a team.
        group: their process group; None for a rank alone.
    """

    number: int
    teams: int
    place: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def of(cls, world: World, size: int) -> Team:
        """Teams of neighbouring ranks; called on every rank.

        Raises:
            UserError: the ranks cannot be dealt out evenly.
        """
        check_size(size, world.world_size)
        if size == 1:
            return cls(world.rank, world.world_size)
        ranks = [list(range(first, first + size)) for first in range(0, world.world_size, size)]
        # Every rank takes part in making each.
        groups = [dist.new_group(members) for members in ranks]
        number, place = divmod(world.rank, size)
        return cls(number, len(ranks), place, size, groups[number])

    @property
    def leads(self) -> bool:
        """Whether this rank hands over what its team has trained."""
        return self.place == 0

    def leader(self, number: int) -> int:
        """The rank that leads a team."""
        return number * self.size

    def share(self, vectors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Give the leader's vectors to all of the team, in place."""
        if self.group is not None:
            for vector in vectors.values():
                dist.broadcast(vector, self.leader(self.number), group=self.group)
        return vectors


class TeammateError(RuntimeError):
    """Another rank of the team failed at the client, and says why."""


def check_size(size: int, world_size: int) -> None:
    """Raise `UserError` unless so many ranks make teams of `size`."""
    if world_size % size:
        fits = [
            count
            for count in (world_size - world_size % size, world_size + size - world_size % size)
            if count
        ]
        raise UserError(
            f"devices_per_client={size} with {world_size} worker{'s' if world_size > 1 else ''}; "
            f"write workers={' or '.join(map(str, fits))}, or devices_per_client=1"
        )
