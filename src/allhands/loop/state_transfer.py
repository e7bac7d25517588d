"""What the members of a changed world bring over to one another, so that all of them are where the
one is that is furthest."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import all_gather_text, broadcast_bytes, broadcast_new
from allhands.errors import WorldError
from allhands.loop.checkpoint import tree
from allhands.loop.shared_measures import SharedMeasures
from allhands.strategies.shards import Shards, bring_shards
from allhands.version import __version__
from allhands.world import World

if TYPE_CHECKING:
    from allhands.loop.bound_loop import BoundLoop
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
        training: of the script, by rank, in which it is.
    """

    units: tuple[int, ...]
    evaluated: int
    training: tuple[int, ...]

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


class StateTransfer:
    """Brings over the state of one training.

    Args:
        loop: the training.
        number: of it in the script.
        progress: of this rank.
        measures: of all ranks.
    """

    def __init__(
        self, loop: BoundLoop, number: int, progress: Progress, measures: SharedMeasures
    ) -> None:
        self._loop, self._number = loop, number
        self._progress, self._measures = progress, measures
        # Where the last unit was a step: the buffers after it.
        self._buffers: list[torch.Tensor] = []
        # By group, what this rank held for others when one was lost.
        self._shards: dict[str, Shards] = {}

    def keep_buffers(self) -> None:
        """A step is taken: what is changed by one that fails can be had again."""
        now = [buffer for _, buffer in self._loop.named_buffers()]
        if len(now) != len(self._buffers):
            self._buffers = [buffer.clone() for buffer in now]
        else:
            for kept, buffer in zip(self._buffers, now, strict=True):
                kept.copy_(buffer)

    def _restore_buffers(self) -> None:
        for (_, buffer), kept in zip(self._loop.named_buffers(), self._buffers, strict=False):
            buffer.copy_(kept)

    def meet(self, joins: bool) -> Standing:
        """In a new group, and the first that is said in it: how far has each member come?"""
        own = {
            "units": -1 if joins else self._progress.units + self._progress.updates,
            "evaluated": 0 if joins else self._loop.evaluated,
            "training": self._number,
        }
        told = [json.loads(text) for text in all_gather_text(json.dumps(own), self._loop.world)]
        return Standing(
            tuple(one["units"] for one in told),
            max(one["evaluated"] for one in told),
            tuple(one["training"] for one in told),
        )

    def end_update(self, standing: Standing) -> bool:
        """Where some rank has begun the update of a step, end that on this rank: all have the whole
        gradients, and none has the whole update.

        Returns:
            Whether this rank has now done what it was doing, but for what others have updated.
        """
        progress = self._progress
        if standing.units[self._loop.world.rank] == standing.newest:
            return progress.updates
        if progress.step is not None and not progress.updates:
            step, group = progress.step
            if group.strategy.parted:
                step.apply()
                progress.updates = True
        return False

    def detach(self) -> None:
        """Take the parts of optimizers' states that this rank holds for others out of their
        optimizers, which are to be bound anew."""
        for name, group in self._loop.groups.items():
            if group.strategy.parted:
                found = group.state.detach()
                self._shards.setdefault(name, found)  # of the first loss, where one follows another

    def bring(self, standing: Standing) -> None:
        """Once the strategy is bound: be where the furthest is."""
        loop, world, newest = self._loop, self._loop.world, standing.newest
        own = standing.units[world.rank]
        loop.evaluated = standing.evaluated
        if -1 in standing.units:
            self._check_alike(standing)
        if own == newest:
            self._restore_buffers()
        if not standing.alike:
            given = self._state() if world.rank == standing.source else None
            state = broadcast_state(given, standing.source, world)
            self._take(state, own, newest)
        for name, group in loop.groups.items():
            if group.strategy.parted:
                shards = self._shards.get(name, {})
                bring_shards(shards, group.settings.model, group.optimizer, world)
        self._shards.clear()
        self._measures.take_up()
        # The next steps are read and looked at as by a rank that begins with them.
        loop.renew_steps()
        loop.look_again(-1 in standing.units)

    def _take(self, state: dict[str, Any], own: int, newest: int) -> None:
        loop = self._loop
        self._progress.units, self._progress.result = newest, state["result"]
        self._progress.begin()
        if own < 0:
            loop.checkpoints.join(state["loop"])
        elif own < newest:
            loop.checkpoints.catch_up(state["loop"], state["counted"])
        step_was_taken = 0 <= own < newest and state["counted"] is not None
        self._measures.load_state(state["measured"], step_was_taken)

    def _state(self) -> dict[str, Any]:
        """What the others need of this rank, which is furthest."""
        return {
            "result": self._progress.result,
            "counted": self._progress.counted,
            "loop": self._loop.checkpoints.in_memory(),
            "measured": self._measures.state(),
        }

    def _check_alike(self, standing: Standing) -> None:
        """Refuse a worker that has joined and cannot take part."""
        loop, source = self._loop, standing.source
        forms = [__version__, loop.signature()]
        told = [json.loads(text) for text in all_gather_text(json.dumps(forms), loop.world)]
        if standing.units[loop.world.rank] >= 0:
            return
        what = ""
        if self._number != standing.training[source]:
            what = (
                f"the others are in training number {standing.training[source]} of the script, "
                "which a worker that comes later cannot enter"
            )
        elif forms != told[source]:
            what = (
                f"it has allhands {forms[0]} and the model {forms[1]}, the others have "
                f"{told[source][0]} and {told[source][1]}"
            )
        if what:
            raise WorldError(f"this worker cannot take part: {what}")


def broadcast_state(state: Mapping[str, Any] | None, source: int, world: World) -> dict[str, Any]:
    """Rank `source`'s state, of tensors and plain data, on every rank; the others pass None.

    Large tensors travel as they are, see `allhands.comm.broadcast_new`.

    Raises:
        UserError: it holds an object that is neither.
    """
    tensors, rest = ({}, {}) if state is None else tree.split(state)
    file = io.BytesIO()
    forms = {path: [list(one.shape), one.dtype] for path, one in tensors.items()}
    torch.save({"rest": rest, "forms": forms}, file)
    told = torch.load(
        io.BytesIO(broadcast_bytes(file.getvalue(), world, source)), weights_only=True
    )
    given = None if state is None else list(tensors.values())
    found = broadcast_new(given, list(told["forms"].values()), world, source)
    return tree.join(told["rest"], dict(zip(told["forms"], found, strict=True)))
