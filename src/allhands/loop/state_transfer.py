"""What the members of a changed world bring over to one another, so that all of them are where the
one is that is furthest."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import broadcast_bytes, broadcast_new
from allhands.loop.checkpoint import tree
from allhands.loop.shared_measures import SharedMeasures
from allhands.loop.standing import Progress, Standing
from allhands.strategies.shards import Shards
from allhands.world import World
from allhands.world.abort import check_not_aborted

if TYPE_CHECKING:
    from allhands.loop.bound_loop import BoundLoop


# What an exchange's `state_dict` and `own_tensors` gave, and on how many ranks.
_Residual = tuple[dict[str, Any], dict[str, torch.Tensor], int]


class StateTransfer:
    """Brings over the state of one training.

    Args:
        loop: the training.
        progress: of this rank.
        measures: of all ranks.
        joins: this rank has joined, and has nothing for others before it was brought all.
    """

    def __init__(
        self, loop: BoundLoop, progress: Progress, measures: SharedMeasures, joins: bool
    ) -> None:
        self._loop, self._has_parts = loop, not joins
        self._progress, self._measures = progress, measures
        # Where the last unit was a step: the buffers after it.
        self._buffers: list[torch.Tensor] = []
        # By group, what this rank held for others when one was lost.
        self._shards: dict[str, Shards] = {}
        # By group, what compression had left over here: as the unit began, and when a rank was
        # lost; with the number of ranks then.
        self._residuals: dict[str, _Residual] = {}
        self._kept: dict[str, _Residual] = {}

    def begin_unit(self) -> None:
        """What all ranks do together begins."""
        self._residuals = self._present_residuals(self._loop.world.world_size)

    def _present_residuals(self, ranks: int) -> dict[str, _Residual]:
        return {
            name: (group.exchange.state_dict(), group.exchange.own_tensors(), ranks)
            for name, group in self._loop.groups.items()
            if group.strategy.keeps_residual
        }

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

    def detach(self, standing: Standing) -> None:
        """Take the parts of optimizers' states that this rank holds for others out of their
        optimizers, which are to be bound anew; and what compression has left over out of the
        exchanges. Where this rank was interrupted, its buffers are what they were before."""
        if standing.units[self._loop.world.rank] == standing.newest:
            self._restore_buffers()
            kept = self._residuals
        else:  # the step is taken, in which this rank was interrupted
            ranks = next((ranks for _, _, ranks in self._residuals.values()), 1)
            kept = self._present_residuals(ranks)
        self._kept = self._kept or kept  # of the first loss, where one follows another
        for name, group in self._loop.groups.items():
            own = standing.units[self._loop.world.rank]
            if group.replicas is not None and own >= 0:
                with self._loop.replica_steps.again():
                    group.replicas.lose(done=own < standing.newest)
            if group.strategy.parted:
                found = group.state.members.detach()
                if self._has_parts:  # of the first loss, where one follows another
                    self._shards.setdefault(name, found)

    def bring(self, standing: Standing) -> None:
        """Once the strategy is bound: be where the furthest is."""
        loop, world, newest = self._loop, self._loop.world, standing.newest
        own = standing.units[world.rank]
        if not standing.alike:
            given = self._state() if world.rank == standing.source else None
            state = broadcast_state(given, standing.source, world)
            self._take(state, own, newest)
        for name, group in loop.groups.items():
            if group.strategy.parted:
                joined = [rank for rank, units in enumerate(standing.units) if units < 0]
                group.state.members.bring(self._shards.get(name, {}), joined)
        check_not_aborted(world)
        self._shards.clear()
        self._has_parts = True
        if own != newest:
            self.keep_buffers()
        self._bring_residuals(standing.source)
        for group in loop.groups.values():
            if group.replicas is not None:
                with loop.replica_steps.again():
                    weights, optimizer = group.replicas.deal(standing.source)
                group.exchange.begin(loop.global_step)
                if optimizer:
                    group.state.collect()
                elif weights:
                    group.replicas.own.settle()
        check_not_aborted(world)
        self._measures.take_up()
        # The next steps are read and looked at as by a rank that begins with them.
        loop.renew_steps()
        loop.look_again(-1 in standing.units)

    def _bring_residuals(self, source: int) -> None:
        """Go on with what compression had left over on this rank; what all ranks have alike is
        that of rank `source`."""
        loop, world = self._loop, self._loop.world
        for name, group in loop.groups.items():
            if not group.strategy.keeps_residual:
                continue
            alike, own, ranks = self._kept.get(name, ({}, {}, 1))
            group.exchange.load_state_dict(
                broadcast_state(alike if world.rank == source else None, source, world)
            )
            if own and ranks > 1:  # parts of the mean over so many ranks
                count = torch.tensor(float(ranks), dtype=torch.float64)
                group.exchange.load_own_tensors({**own, "ranks": count})
        self._kept = {}

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


def broadcast_state(state: Mapping[str, Any] | None, source: int, world: World) -> dict[str, Any]:
    """Rank `source`'s state, of tensors and plain data, on every rank; the others pass None.

    Large tensors travel as they are, see `allhands.comm.broadcast_new`.

    Raises:
        UserError: it holds an object that is neither.
        WorldError: the group was aborted meanwhile.
    """
    tensors, rest = ({}, {}) if state is None else tree.split(state)
    file = io.BytesIO()
    forms = {path: [list(one.shape), one.dtype] for path, one in tensors.items()}
    torch.save({"rest": rest, "forms": forms}, file)
    sent = broadcast_bytes(file.getvalue(), world, source)
    check_not_aborted(world)
    told = torch.load(io.BytesIO(sent), weights_only=True)
    given = None if state is None else list(tensors.values())
    found = broadcast_new(given, list(told["forms"].values()), world, source)
    check_not_aborted(world)
    return tree.join(told["rest"], dict(zip(told["forms"], found, strict=True)))
