"""How far the ranks of an elastic training have come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import all_gather_rows
from allhands.world import World

if TYPE_CHECKING:
    from allhands.loop.optimizer_group import OptimizerGroup
    from allhands.step import OptimizerStep


@dataclass
class Progress:
    """How far this rank has come.

    Attributes:
        units: that are done.
        result: of the last of them.
        counted: where that was a step, what it has changed beside weights.
        step: the step that is being taken, and its group, once its gradients are whole.
        updates: parts of its update are made, and on their way to the other ranks.
    """

    units: int = 0
    result: Any = None
    counted: Any = None
    step: tuple[OptimizerStep, OptimizerGroup] | None = None
    updates: bool = False

    def begin(self) -> None:
        """A further unit begins."""
        self.step, self.updates = None, False

    def done(self, result: Any, counted: Any) -> None:
        """A further unit is."""
        self.units, self.result, self.counted = self.units + 1, result, counted
        self.begin()


@dataclass(frozen=True)
class Standing:
    """How far all members have come, the same on all of them.

    Attributes:
        units: that each has done, by rank; -1 of one that has joined.
        evaluated: steps of evaluation, of the furthest.
    """

    units: tuple[int, ...]
    evaluated: int

    @property
    def newest(self) -> int:
        """Units of the furthest."""
        return max(self.units)

    @property
    def source(self) -> int:
        """The rank whose state the others take."""
        return self.units.index(self.newest)

    @property
    def alike(self) -> bool:
        """Whether all are as far."""
        return all(units == self.newest for units in self.units)


def meet(units: int, evaluated: int, world: World) -> Standing:
    """In a new group: how far has each member come?

    Args:
        units: that this rank has done; -1 where it has joined.
        evaluated: its steps of evaluation.
        world: the members.
    """
    own = torch.tensor([[units, evaluated]], device=world.device)
    rows = [row[0].tolist() for row in all_gather_rows(own, world)]
    return Standing(tuple(row[0] for row in rows), max(row[1] for row in rows))
