"""Trainings that go on in their processes when a worker is lost, and take in one that comes.

What all ranks do together is cut into units: an optimizer step, an evaluation, a round of the
agreement. All ranks do the same units in the same order, and each has a collective that none can
leave before all have come to it; so when a worker is lost, those that are left differ by one unit
at most. They make a new group, take the state of the one that is furthest, and repeat the unit that
was interrupted, with the same global batch dealt out among them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import calls
from allhands.data.feed import InMemoryFeed
from allhands.data.loaders import LoaderFeed
from allhands.data.sources import Sequential, Shuffled
from allhands.errors import WorldError
from allhands.launch import worker
from allhands.loop.joining import is_loss
from allhands.loop.membership_log import MembershipLog
from allhands.loop.shared_measures import SharedMeasures
from allhands.loop.state_transfer import Progress, StateTransfer
from allhands.step.closure import takes_closure
from allhands.world.regroup import Membership, Regrouping, began_with

if TYPE_CHECKING:
    from allhands.loop.bound_loop import BoundLoop
    from allhands.loop.optimizer_group import OptimizerGroup
    from allhands.step import OptimizerStep

# Seconds for which the launcher is waited for to say who is lost, once a collective has failed.
_LONGEST_WAIT = 30.0


class Elastic:
    """Does the units of one training.

    Args:
        loop: the training.
        regrouping: of its world.

    Attributes:
        began_with: how many workers began the job.
        brings_weights: the strategy is bound to weights that are brought over afterwards, and need
            not send them.
    """

    trainings = 0  # that were begun in this process

    def __init__(self, loop: BoundLoop, regrouping: Regrouping) -> None:
        Elastic.trainings += 1
        self.loop, self.world, self.regrouping = loop, loop.world, regrouping
        self.began_with = began_with() or loop.world.world_size
        self.measures = SharedMeasures(loop)
        self._progress = Progress()
        self._transfer = StateTransfer(loop, Elastic.trainings, self._progress, self.measures)
        self._within = False
        self._log = MembershipLog(loop)
        self.brings_weights = self.joins
        self._standing = self._transfer.meet(True) if self.joins else None

    # ------------------------------------------------------------------ units

    def run(self, unit: Callable[[], Any]) -> Any:
        """Do a unit, as often as it takes; its result, plain data that is the same on all ranks."""
        if self._within:
            return unit()

        def checked() -> Any:
            result = unit()
            self.regrouping.check()
            return result

        return self._until_done(checked, checked, lambda: None)

    def step(self, take: Callable[[Any], None], batch: Any) -> None:
        """Take an optimizer step with a batch, or where members change meanwhile, with this rank's
        new share of the same global batch."""

        def checked(share: Any) -> None:
            take(share)
            if self._progress.updates:  # the ranks have told one another what they have updated
                if self.world.device.type == "cuda":
                    torch.cuda.synchronize(self.world.device)
                self.regrouping.check()

        self._until_done(
            lambda: checked(batch), lambda: checked(self.loop.same_batch()), self._step_taken
        )

    def _until_done(
        self, unit: Callable[[], Any], again: Callable[[], Any], finish: Callable[[], Any]
    ) -> Any:
        """Do a unit, and where members change meanwhile do it `again`; `finish` gives what it has
        counted."""
        self.measures.begin_unit()
        self._progress.begin()
        do = unit
        while True:
            try:
                self._within = True
                result = do()
            except (RuntimeError, WorldError) as error:
                self._within = False
                if self._recover(error):
                    return self._progress.result
                do = again
            else:
                self._progress.done(result, finish())
                return result
            finally:
                self._within = False

    def before_update(self, step: OptimizerStep, group: OptimizerGroup) -> None:
        """Before the update of a step, on all ranks, whose gradients are whole."""
        self._progress.step = step, group
        self.measures.share()
        self.regrouping.check()
        self._progress.updates = group.strategy.parted and self.world.world_size > 1

    def _step_taken(self) -> Any:
        self.measures.step_taken()
        self._transfer.keep_buffers()
        return self.loop.checkpoints.counted()

    # ------------------------------------------------------------------ changes

    def job_ends(self) -> bool:
        """Whether a signal was sent to all workers, and not to this one alone."""
        return self.regrouping.job_ends()

    def leave_if_told(self) -> None:
        """Between two steps: leave the training where this rank alone got a signal; the others go
        on.

        Raises:
            SystemExit: this rank leaves.
        """
        number = self.loop.agreement.leaves
        if number:
            self.loop.agreement.heed()
            self.regrouping.end_watch()
            print(f"allhands: rank {self.world.rank} leaves for signal {number}", file=sys.stderr)
            raise SystemExit(128 + number)

    @property
    def joins(self) -> bool:
        """Whether this process was taken in, and has not got the state of the others yet."""
        return self.regrouping.joined

    def changed(self) -> bool:
        """Whether a worker waits to be taken in; asked by rank 0 between two steps."""
        return self.regrouping.changed()

    def take_in(self) -> None:
        """Between two steps: make a group with the workers that wait."""
        self._recover(None)

    def refused(self) -> str:
        """Why this training cannot go on in its processes, as a sentence; "" where it can."""
        loop = self.loop
        if loop.held_by_ranks:
            return f"'{loop.held_by_ranks[0]}' was registered with each_rank=True"
        for group in loop.groups.values():
            strategy = group.strategy
            if takes_closure(group.optimizer):
                kind = type(group.optimizer).__name__
                return (
                    f"{kind} asks the workers in the middle of its update, which cannot be repeated"
                )
            if strategy.parted and group.precision.scaler is not None:
                return "with precision='fp16' the workers decide within the update; write 'bf16'"
            if strategy.parted and callable(getattr(group.optimizer, "eval", None)):
                kind = type(group.optimizer).__name__
                return f"{kind} evaluates other weights than it trains; write DDP()"
            if why := strategy.regroup_refused():
                return why
        for feed in loop.feeds.values():
            if not isinstance(feed, (InMemoryFeed, LoaderFeed)):
                return f"loader '{feed.name}' is a stream, which cannot be entered in the middle"
            if not isinstance(feed.order, (Sequential, Shuffled)):
                return f"loader '{feed.name}' has a sampler of its own, whose state one rank has"
        return ""

    def _recover(self, error: BaseException | None) -> bool:
        """Go on with the members that there are.

        Args:
            error: with which a unit ended; None between two units.

        Returns:
            Whether another rank had done the unit, so that it is not to be done again.
        """
        began, units = time.monotonic(), self._progress.units
        if error is not None and not is_loss(error, self.regrouping):
            raise error
        refused = self.refused()
        while True:
            membership = self.regrouping.newest(_LONGEST_WAIT if error is not None else 0.0)
            if membership is None:
                if error is None:
                    return False
                raise error
            if refused:
                raise WorldError(
                    f"{'; '.join(membership.lost)} was lost, and the training cannot go on without "
                    f"starting again: {refused}. Write --max-restarts, and logdir= and "
                    "resume='auto', so that all workers start again from the newest checkpoint"
                )
            try:
                self._regroup(membership)
            except (RuntimeError, WorldError) as again:
                if not is_loss(again, self.regrouping):
                    raise
                error = again
                continue
            break
        worker.take_up(membership.epoch)
        self.loop.regrouped()
        self._log.add(membership, time.monotonic() - began, error is not None)
        return self._progress.units > units

    def _regroup(self, membership: Membership) -> None:
        loop = self.loop
        loop.leave()
        self.regrouping.enter(membership)
        calls.restart()
        standing = self._transfer.meet(False)
        if self._transfer.end_update(standing):
            self._end_step()
        self._transfer.detach()
        self.brings_weights = True
        loop.bind()
        loop.checkpoints.meet()
        self._transfer.bring(standing)
        loop.begin_anew()
        loop.checkpoints.open()
        loop.agreement.begin(loop.global_step + loop.evaluated)

    def _end_step(self) -> None:
        """The update of the step is made that was interrupted."""
        assert self._progress.step is not None
        if not self.measures.is_shared:
            raise WorldError(
                "a further worker was lost while the others made up for one, and with it what they "
                "had measured in the step. Write --max-restarts, and logdir= and resume='auto', so "
                "that all workers start again from the newest checkpoint"
            )
        _, group = self._progress.step
        self.loop.stepped(group)
        self._progress.done(None, self._step_taken())

    def receive(self) -> None:
        """In a process that is taken in: put the training where the others are."""
        assert self._standing is not None
        self.regrouping.joined = False
        self._transfer.bring(self._standing)
        worker.take_up(self.regrouping.epoch)
