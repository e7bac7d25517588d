"""What all ranks of a training do together, again where a worker is lost meanwhile.

It is cut into units, which all ranks do in the same order. Each has a collective that none can
leave before all have come to it; so when a worker is lost, those that are left differ by one unit
at most. They make a new group, take the state of the one that is furthest, and repeat the unit that
was interrupted.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import all_reduce_sum, calls
from allhands.errors import WorldError
from allhands.launch import worker
from allhands.loop.joining import is_loss
from allhands.loop.membership_log import MembershipLog
from allhands.loop.standing import Progress, Standing, meet
from allhands.world import World
from allhands.world.regroup import Membership, Regrouping, began_with

if TYPE_CHECKING:
    from allhands.loop.lifecycle import Lifecycle

# Seconds for which the launcher is waited for to say who is lost, once a collective has failed.
_LONGEST_WAIT = 30.0


class ElasticUnits(ABC):
    """Does the units of one training.

    Attributes:
        began_with: how many workers began the job.
        progress: of this rank.
    """

    trainings = 0  # that were begun in this process

    def __init__(self, world: World, regrouping: Regrouping) -> None:
        ElasticUnits.trainings += 1
        self.world, self.regrouping = world, regrouping
        self.began_with = began_with() or world.world_size
        self.progress = Progress()
        self._within = False
        #: Of a process that has joined, until it has the state of the others.
        self._standing = meet(-1, 0, self.world) if self.joins else None

    def attach(self, loop: Lifecycle) -> None:
        """Name the training whose units these are."""
        self._training, self._log = loop, MembershipLog(loop)

    # ------------------------------------------------------------------ units

    def run(self, unit: Callable[[], Any]) -> Any:
        """Do a unit, as often as it takes; its result, plain data that is the same on all ranks."""
        if self._within:
            return unit()

        def checked() -> Any:
            result = unit()
            self._wait_for_all()
            return result

        return self._until_done(checked, checked, self.unit_done)

    def _wait_for_all(self) -> None:
        """A unit may have no collective, or none that all must come to: a loss that is finite is
        looked at by each rank alone."""
        if self.world.world_size > 1:
            calls.note("the end of what all ranks do together")
            all_reduce_sum([count := torch.zeros(1, device=self.world.device)], self.world)
            count.item()
        self.regrouping.check()

    def _until_done(
        self, unit: Callable[[], Any], again: Callable[[], Any], finish: Callable[[], Any]
    ) -> Any:
        """Do a unit, and where members change meanwhile do it `again`; `finish` gives what it has
        counted."""
        self.begin_unit()
        do, repeats = unit, False
        while True:
            try:
                self._within = True
                result = do()
            except Exception as error:
                self._within = False
                if not is_loss(error, self.regrouping):
                    raise
                if self._recover(error):
                    worker.take_up(self.regrouping.epoch, repeated=True)
                    return self.progress.result
                do, repeats = again, True
            else:
                self.progress.done(result, finish())
                if repeats:
                    worker.take_up(self.regrouping.epoch, repeated=True)
                return result
            finally:
                self._within = False

    # ------------------------------------------------------------------ changes

    def job_ends(self) -> bool:
        """Whether a signal was sent to all workers, and not to this one alone."""
        return self.regrouping.job_ends()

    def leave_if_told(self) -> None:
        """Between two steps: leave the training where this rank alone got a signal; the others go
        on.
        """
        number = self._training.agreement.leaves
        if number:
            self._training.agreement.heed()
            self.leave()
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

    # ------------------------------------------------------------------ one kind of training

    @abstractmethod
    def refused(self) -> str:
        """Why this training cannot go on in its processes, as a sentence; "" where it can."""

    def lost_for_good(self) -> str:
        """What a lost worker has taken with it, as the end of a sentence; "" where nothing."""
        return ""

    def begin_unit(self) -> None:
        """A unit begins."""
        self.progress.begin()

    def unit_done(self) -> None:
        """A unit is done that is no step."""
        return

    @abstractmethod
    def leave(self) -> None:
        """Let go of what belongs to the group, in which some rank may be gone."""

    @abstractmethod
    def bind(self, standing: Standing) -> None:
        """Take the training up in a new group; all ranks call it together."""

    @abstractmethod
    def bring(self, standing: Standing) -> None:
        """Be where the furthest is."""

    def begin_anew(self) -> None:
        """All are as far: units follow."""

    def _recover(self, error: BaseException | None) -> bool:
        """Go on with the members that there are.

        Args:
            error: with which a unit ended; None between two units.

        Returns:
            Whether another rank had done the unit, so that it is not to be done again.
        """
        began, units = time.monotonic(), self.progress.units
        refused = self.refused()
        while True:
            membership = self.regrouping.newest(_LONGEST_WAIT if error is not None else 0.0)
            if membership is None:
                if error is None:
                    return False
                raise error
            if self.regrouping.is_apart(membership):
                self._leave_copy(membership)
            if refused:
                raise WorldError(
                    f"{'; '.join(membership.lost)} was lost, and the training cannot go on without "
                    f"starting again: {refused}. Write --max-restarts, and logdir= and "
                    "resume='auto', so that all workers start again from the newest checkpoint"
                )
            try:
                self._regroup(membership)
            except Exception as again:
                if not is_loss(again, self.regrouping):
                    raise
                error = again
                continue
            break
        worker.take_up(membership.epoch, repeated=error is None)
        self._training.regrouped()
        lost = self.lost_for_good() if membership.lost else ""
        self._log.add(membership, time.monotonic() - began, error is not None, lost)
        return self.progress.units > units

    def _leave_copy(self, membership: Membership) -> None:
        """Other parts of the copy of the model are lost of which this rank holds one: leave."""
        self.leave()
        self._training.checkpoints.abandon()
        self.regrouping.leave()
        self.leave_if_told()
        print(
            f"allhands: rank {self.world.rank} leaves, as its copy of the model has lost a part: "
            f"{'; '.join(membership.lost)}",
            file=sys.stderr,
        )
        raise SystemExit(os.EX_TEMPFAIL)  # no signal's, and no success

    def _regroup(self, membership: Membership) -> None:
        loop = self._training
        self.leave()
        loop.checkpoints.abandon()
        self.regrouping.enter(membership)
        calls.restart()
        standing = meet(self.progress.units + self.progress.updates, loop.evaluated, self.world)
        self.regrouping.check()
        self.bind(standing)
        loop.checkpoints.meet()
        self._bring(standing)
        self.begin_anew()
        loop.checkpoints.open()
        if standing.alike or -1 in standing.units:
            loop.agreement.begin(loop.global_step + loop.evaluated)
        else:
            loop.agreement.follow(standing.source)

    def _bring(self, standing: Standing) -> None:
        self._training.evaluated = standing.evaluated
        self.bring(standing)

    def receive(self) -> None:
        """In a process that is taken in: put the training where the others are."""
        assert self._standing is not None
        self.regrouping.joined = False
        try:
            self._bring(self._standing)
        except Exception as error:
            if not is_loss(error, self.regrouping):
                raise
            raise WorldError(
                "another worker was lost while this one was given the state of the training; it "
                "ends, and is started again where --max-restarts is given"
            ) from error
        worker.take_up(self.regrouping.epoch)
