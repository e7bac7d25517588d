"""Trainings that go on in their processes when a worker is lost, and take in one that comes.

What all ranks do together is cut into units: an optimizer step, an evaluation, a round of the
agreement. All ranks do the same units in the same order, and each has a collective that none can
leave before all have come to it; so when a worker is lost, those that are left differ by one unit
at most. They make a new group, take the state of the one that is furthest, and repeat the unit that
was interrupted, with the same global batch dealt out among them.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import all_gather_rows, all_gather_text, calls
from allhands.data.feed import InMemoryFeed
from allhands.data.loaders import LoaderFeed
from allhands.data.sources import Sequential, Shuffled
from allhands.errors import WorldError
from allhands.launch import worker
from allhands.loop.logged import Sums
from allhands.loop.membership_log import MembershipLog
from allhands.step.closure import takes_closure
from allhands.version import __version__
from allhands.world import World
from allhands.world.regroup import Membership, Regrouping, began_with

if TYPE_CHECKING:
    from allhands.loop.bound_loop import BoundLoop

# Seconds for which the launcher is waited for to say who is lost, once a collective has failed.
_LONGEST_WAIT = 30.0
# What PyTorch's errors say where a connection has ended, or a group was aborted.
_SIGNS = ("gloo", "NCCL", "nccl", "onnection", "peer", "aborted", "ProcessGroup", "process group")

_regrouping: Regrouping | None = None


def regrouping_of(world: World) -> Regrouping | None:
    """The memberships of this process's world; None where its members never change. A process that
    was started in the place of a lost one waits until it is taken in.

    To be called on every rank once a training begins.
    """
    global _regrouping
    if began_with() is None or not worker.active():
        return None
    if _regrouping is None:
        _regrouping = Regrouping(worker.fail)
        if _regrouping.outside:
            _join(_regrouping)
        else:
            _regrouping.watch()
    return _regrouping


def _join(regrouping: Regrouping) -> None:
    worker.ask_to_join()
    while True:
        membership = regrouping.newest(float("inf"))
        assert membership is not None
        try:
            regrouping.enter(membership)
        except (RuntimeError, WorldError) as error:
            if not is_loss(error, regrouping):
                raise
            regrouping.outside = True
        else:
            regrouping.joined = True
            return


def is_loss(error: BaseException, regrouping: Regrouping) -> bool:
    """Whether an error may be that some rank is gone."""
    if not isinstance(error, (RuntimeError, WorldError)):
        return False
    return any(sign in str(error) for sign in _SIGNS) or regrouping.changed()


class Elastic:
    """Does the units of one training.

    Args:
        loop: the training.
        regrouping: of its world.

    Attributes:
        began_with: how many workers began the job.
    """

    trainings = 0  # that were begun in this process

    def __init__(self, loop: BoundLoop, regrouping: Regrouping) -> None:
        Elastic.trainings += 1
        self.loop, self.world, self.regrouping = loop, loop.world, regrouping
        self.began_with = began_with() or loop.world.world_size
        self.number = Elastic.trainings
        #: Units that are done.
        self.units = 0
        self._result: Any = None  # of the last of them
        self._within = False
        # What all ranks had measured by the last step, and of which loader.
        self._measured: tuple[Any, list[dict[str, torch.Tensor]]] | None = None
        # What was logged on this rank: as the unit began, and what of it all ranks know.
        self._logged: Sums = ({}, {})
        self._shared: Sums = ({}, {})
        self._about_to_share: Sums = ({}, {})
        self._about_to_keep: tuple[Any, list[dict[str, torch.Tensor]]] | None = None
        # Where the last unit was a step: what it has changed beside weights.
        self._counted: Any = None
        self._buffers: list[torch.Tensor] = []
        self._log = MembershipLog(loop)

    # ------------------------------------------------------------------ units

    def run(self, unit: Callable[[], Any]) -> Any:
        """Do a unit, as often as it takes; its result, plain data that is the same on all ranks."""
        if self._within:
            return unit()
        self._logged = self.loop.logged.copy()
        while True:
            try:
                self._within = True
                result = unit()
                self.regrouping.check()
            except (RuntimeError, WorldError) as error:
                self._within = False
                if self._recover(error):
                    return self._result
            else:
                self.units, self._result, self._counted = self.units + 1, result, None
                return result
            finally:
                self._within = False

    def step(self, take: Callable[[Any], None], batch: Any) -> None:
        """Take an optimizer step with a batch, or where members change meanwhile, with this rank's
        new share of the same global batch."""
        self._logged = self.loop.logged.copy()
        while True:
            try:
                self._within = True
                take(batch)
            except (RuntimeError, WorldError) as error:
                self._within = False
                if self._recover(error):
                    return
                batch = self.loop.same_batch()
            else:
                self.units, self._result = self.units + 1, None
                self._counted = self.loop.checkpoints.counted()
                self._keep_buffers()
                return
            finally:
                self._within = False

    def before_update(self) -> None:
        """Before the update of a step, on all ranks: let each know what the others have measured,
        as one of them may not be there to tell it later."""
        loop, world = self.loop, self.world
        if loop.measure is None:
            return
        calls.note("sharing what was measured")
        mine, logged = loop.measure.partial(), loop.logged.partial()
        mine |= {f"logged/{name}": value for name, value in logged.items()}
        numbers = mine.pop("numbers")
        more = _packed(mine) if mine else b""
        row = torch.cat([numbers, torch.tensor([len(more)], dtype=torch.float64)])
        rows = [one.cpu() for one in all_gather_rows(row.to(world.device)[None], world)]
        parts = [{"numbers": one[0, :-1]} for one in rows]
        if any(float(one[0, -1]) for one in rows):
            data = torch.frombuffer(bytearray(more), dtype=torch.uint8) if more else None
            data = torch.empty(0, dtype=torch.uint8) if data is None else data
            further = all_gather_rows(data.to(world.device), world)
            for part, own in zip(parts, further, strict=True):
                part.update(_unpacked(own) if len(own) else {})
        self.regrouping.check()
        self._about_to_keep = loop.measure, parts
        self._about_to_share = loop.logged.copy()

    def _keep_buffers(self) -> None:
        """The step is taken: what is changed by a step that fails can be had again."""
        if self.loop.measure is not None:
            self._measured, self._shared = self._about_to_keep, self._about_to_share
        now = [buffer for _, buffer in self.loop.named_buffers()]
        if len(now) != len(self._buffers):
            self._buffers = [buffer.clone() for buffer in now]
        else:
            for kept, buffer in zip(self._buffers, now, strict=True):
                kept.copy_(buffer)

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

    def forget_measured(self) -> None:
        """What was measured is told, and begins anew."""
        self._measured, self._shared = None, ({}, {})

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
            if not strategy.regroups():
                return f"strategy '{strategy.in_words()}' cannot be bound to other workers"
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
        began, units = time.monotonic(), self.units
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
        return self.units > units

    def _regroup(self, membership: Membership) -> None:
        loop = self.loop
        loop.leave()
        self.regrouping.enter(membership)
        calls.restart()
        loop.bind()
        loop.checkpoints.meet()
        self._share_state(False)
        loop.checkpoints.open()
        loop.agreement.begin(loop.global_step + loop.evaluated)

    def receive(self) -> None:
        """In a process that is taken in: put the training where the others are."""
        self.regrouping.joined = False
        self._share_state(True)
        worker.take_up(self.regrouping.epoch)

    def _share_state(self, joins: bool) -> None:
        """All ranks get the state of the one that is furthest, where some are not as far."""
        loop, world = self.loop, self.world
        own = {
            "units": -1 if joins else self.units,
            "evaluated": loop.evaluated,
            "training": self.number,
            "alike": [__version__, loop.signature()],
        }
        told = [json.loads(text) for text in all_gather_text(json.dumps(own), world)]
        newest = max(one["units"] for one in told)
        source = next(rank for rank, one in enumerate(told) if one["units"] == newest)
        if joins:
            self._check_alike(own, told[source])
        loop.evaluated = max(one["evaluated"] for one in told)
        if all(one["units"] == newest for one in told):
            self._restore_buffers()
            self._take_up_measured()
            self._go_on()
            return
        state = _broadcast(self._state() if world.rank == source else None, source, world)
        behind = own["units"] < newest
        self.units, self._result = newest, state["result"]
        if not behind:
            self._restore_buffers()
        elif joins:
            loop.checkpoints.join(state["loop"])
        else:
            loop.checkpoints.catch_up(state["loop"], state["counted"])
            if state["counted"] is not None:
                self._logged = self._shared = self._about_to_share
        if state["measured"] is not None:
            self._measured = loop.measures[state["of"]], state["measured"]
        self._take_up_measured()
        self._go_on()

    def _go_on(self) -> None:
        """The next steps are read and looked at as by a rank that begins with them."""
        self.loop.renew_steps()
        self.loop.look_again()

    def _state(self) -> dict[str, Any]:
        """What the others need of this rank, which is furthest."""
        self._restore_buffers()
        measured = self._measured
        return {
            "result": self._result,
            "counted": self._counted,
            "loop": self.loop.checkpoints.in_memory(),
            "of": self._name_of(measured[0]) if measured is not None else None,
            "measured": None if measured is None else measured[1],
        }

    def _name_of(self, measure: Any) -> str:
        return next(name for name, one in self.loop.measures.items() if one is measure)

    def _restore_buffers(self) -> None:
        for (_, buffer), kept in zip(self.loop.named_buffers(), self._buffers, strict=False):
            buffer.copy_(kept)

    def _take_up_measured(self) -> None:
        """Rank 0 goes on with what all ranks have measured, those that are gone among them."""
        # Before the first step has ended, only the one that failed was measured.
        measure, parts = self._measured or (self.loop.measure, [])
        if measure is None:
            return
        names = sorted({name for part in parts for name in part if name.startswith("logged/")})
        loop, first = self.loop, self.world.rank == 0
        measure.start(measure.where)
        loop.logged.start()
        measure.take_up([_without(part, "logged/") for part in parts] if first else [])
        logged = [_under(part, "logged/") for part in parts] if first else []
        loop.logged.take_up(logged, [name.removeprefix("logged/") for name in names])
        # What was logged here since the ranks have shared theirs.
        (sums, weights), (shared, counted) = self._logged, self._shared
        self._shared = loop.logged.copy()
        for name, total in sums.items():
            count = weights[name] - counted.get(name, 0.0)
            if count > 0:
                loop.logged.add(name, (total - shared.get(name, 0.0)) / count, count)
        self._logged = loop.logged.copy()

    def _check_alike(self, own: dict[str, Any], others: dict[str, Any]) -> None:
        what = ""
        if own["training"] != others["training"]:
            what = (
                f"the others are in training number {others['training']} of the script, which a "
                "worker that comes later cannot enter"
            )
        elif own["alike"] != others["alike"]:
            what = (
                f"it has allhands {own['alike'][0]} and the model {own['alike'][1]}, the others "
                f"have {others['alike'][0]} and {others['alike'][1]}"
            )
        if what:
            raise WorldError(f"this worker cannot take part: {what}")


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), weights_only=True)


def _broadcast(value: Any, source: int, world: World) -> Any:
    """Rank `source`'s value, of tensors and plain data, on every rank."""
    data = torch.empty(0, dtype=torch.uint8, device=world.device)
    if world.rank == source:
        data = torch.frombuffer(bytearray(_packed(value)), dtype=torch.uint8).to(world.device)
    got = all_gather_rows(data, world)[source]
    return _unpacked(got) if world.rank != source else value


def _under(part: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {
        key.removeprefix(prefix): value for key, value in part.items() if key.startswith(prefix)
    }


def _without(part: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in part.items() if not key.startswith(prefix)}
