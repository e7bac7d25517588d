"""Worlds whose members change while a training goes on.

Only the launcher of an elastic job knows which processes are gone, and it alone says who trains
together: it numbers the memberships, and writes each into the store that all processes reach.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from allhands.compat import abort_groups, forget_groups, set_group_timeout
from allhands.errors import WorldError
from allhands.world import connections, group, interface
from allhands.world.abort import aborted_error, reset_captured
from allhands.world.connections import CONNECT_S, ELASTIC
from allhands.world.group import JOINS, World
from allhands.world.layout import Layout
from allhands.world.membership import SupersededError
from allhands.world.native_threads import destroy_group
from allhands.world.request import DEFAULT_TIMEOUT

# Of the store's keys: those of the memberships, numbered from 1, the signal that ends the job, why
# nobody goes on after a loss, and what a worker that joins must have in common with the others.
KEY = "elastic/membership"
STOP_KEY = "elastic/stop"
OVER_KEY = "elastic/over"
TERMS_KEY = "elastic/terms"
# Seconds for aborting a group, and for an operation that was aborted to end.
_ABORT_S = 30.0
_LOOK_EVERY = 0.05


@dataclass(frozen=True)
class Membership:
    """Who trains together.

    Attributes:
        epoch: its number; the workers that were started form number 0.
        members: the processes in the order of their ranks, each by the rank under which it was
            started.
        lost: who has left since the last one that was taken up, and why.
        joined: those of the members that were not in the last one.
        apart: those that live, and hold parts of a copy of the model that has lost others. They
            leave.
    """

    epoch: int
    members: tuple[int, ...]
    lost: tuple[str, ...] = ()
    joined: tuple[int, ...] = ()
    apart: tuple[int, ...] = ()


class Regrouping:
    """The memberships of this process's world.

    Args:
        on_stuck: called with a line where the group cannot be left; is to end this process.

    Attributes:
        epoch: of the membership in which this process is, or was last.
    """

    def __init__(self, on_stuck: Callable[[str], Any]) -> None:
        self._on_stuck = on_stuck
        self.epoch = 0
        self._own = int(os.environ["RANK"])
        #: Not taken in yet; taken in, and without the state of the others.
        self.outside, self.joined = os.environ.get(JOINS) == "1", False
        self._store = _shared_store()
        self._is_nccl = _is_nccl()
        #: The group was aborted: what it has given since is not to be used.
        self.aborted, self._lock = False, threading.Lock()
        self._watched = threading.Event()
        self._trains_in = threading.get_ident()
        state = group.state()
        assert state is not None
        state.is_aborted = lambda: self.aborted

    def changed(self) -> bool:
        """Whether there is a newer membership."""
        return bool(self._store.check([f"{KEY}/{self.epoch + 1}"]))

    def has_lost(self) -> bool:
        """Whether a newer membership tells of a loss, and not of workers alone that join."""
        epoch = self.epoch + 1
        while self._store.check([f"{KEY}/{epoch}"]):
            if self._read(epoch).lost:
                return True
            epoch += 1
        return False

    def job_ends(self) -> bool:
        """Whether a signal was sent to all workers, and not to this one alone."""
        return bool(self._store.check([STOP_KEY]))

    def set_terms(self, text: str) -> None:
        """Say what a worker that joins must have in common with those that take part."""
        self._store.set(TERMS_KEY, text)

    def terms(self) -> str:
        """What one that takes part has set, which is waited for."""
        while not self._store.check([TERMS_KEY]):
            time.sleep(_LOOK_EVERY)
        text: str = self._store.get(TERMS_KEY).decode()
        return text

    def _read(self, epoch: int) -> Membership:
        told = json.loads(self._store.get(f"{KEY}/{epoch}"))
        members, lost, joined, apart = (
            tuple(told.get(name, ())) for name in ("members", "lost", "joined", "apart")
        )
        return Membership(epoch, members, lost, joined, apart)

    def is_apart(self, membership: Membership) -> bool:
        """Whether this process is to leave, as the copy of the model is lost of which it holds a
        part."""
        return not self.outside and self._own in membership.apart

    def newest(self, longest: float) -> Membership | None:
        """The newest membership after this process's own, which is waited for. This process is
        among its members, or apart.

        Args:
            longest: seconds; None is given back after them, and once nobody goes on.

        Raises:
            WorldError: this process is not among its members any more.
        """
        deadline = time.monotonic() + longest
        while True:
            epoch = self.epoch
            while self._store.check([f"{KEY}/{epoch + 1}"]):
                epoch += 1
            if epoch > self.epoch:
                membership = self._read(epoch)
                if self._own in membership.members or self.is_apart(membership):
                    return membership
                if not self.outside:
                    raise WorldError(
                        f"this process, started as rank {self._own}, was taken for lost, and the "
                        f"others train without it since membership {epoch}"
                    )
            over = not self.outside and self._store.check([OVER_KEY])
            if over or time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_EVERY)

    def check(self) -> None:
        """Raise `WorldError` where the group was aborted: on a GPU, operations then end without a
        word, and what they give is not to be used."""
        if self.aborted:
            raise aborted_error()

    def enter(self, membership: Membership) -> World:
        """Leave the group without the help of the others, and make that of a membership.

        The `World` that `init` has returned is changed, so that whoever holds it knows.

        Raises:
            WorldError: the members did not meet; `SupersededError` where they have changed again.
        """
        self.epoch = membership.epoch
        rank = membership.members.index(self._own)
        self.leave()
        self.aborted = False
        world = _regroup(membership.epoch, rank, len(membership.members), self.changed)
        self.outside = False
        self.watch()
        return world

    def watch(self) -> None:
        """Let what waits in the group fail once a member is lost: not every process has a
        connection to one that is gone."""
        self.end_watch()
        self.aborted, self._watched = False, threading.Event()
        threading.Thread(
            target=self._look_for_losses,
            args=(self.epoch, self._watched, self._store.clone()),
            name="allhands-membership",
            daemon=True,
        ).start()

    def end_watch(self) -> None:
        """The group is left, or the training has ended."""
        self._watched.set()

    def leave(self) -> None:
        """Let go of the group, of which some process may be gone. What waits in it fails."""
        self.end_watch()
        state = group.state()
        assert state is not None
        if not state.made_group:
            return
        self._abort()
        state.made_group = False
        if state.world.backend == "nccl":
            forget_groups()
        else:
            destroy_group(state.world.backend)

    def _abort(self) -> None:
        with self._lock:
            if self.aborted:
                return
            self.aborted = True
            limit = self._limit()
            connections.end_all()
            if self._is_nccl:
                # nccl waits for graphs with its exchanges to be gone, and these for nccl's abort.
                resets = threading.Thread(target=reset_captured, daemon=True)
                resets.start()
                abort_groups()
                resets.join()
            limit.cancel()

    def _limit(self) -> threading.Timer:
        """Ends this process where aborting takes too long."""
        text = f"the process group was not aborted within {_ABORT_S:.0f} s after a worker was lost"
        timer = threading.Timer(_ABORT_S, self._on_stuck, (text,))
        timer.daemon = True
        timer.start()
        return timer

    def _look_for_losses(self, epoch: int, stopped: threading.Event, store: Any) -> None:
        try:
            while not stopped.wait(_LOOK_EVERY):
                if not store.check([f"{KEY}/{epoch + 1}"]):
                    continue
                lost = json.loads(store.get(f"{KEY}/{epoch + 1}"))["lost"]
                if lost or store.check([f"{KEY}/{epoch + 2}"]):
                    if not stopped.is_set():
                        self._abort()
                        self._end_where_stuck(stopped)
                    return
        except (RuntimeError, ValueError):  # the store is gone, and the launcher with it
            return

    def _end_where_stuck(self, left: threading.Event) -> None:
        """End this process where the training waits on in an operation of the group that was
        aborted: nccl may do so for ever."""
        if not self._is_nccl:
            return
        since, place = time.monotonic(), _place_of(self._trains_in)
        while not left.wait(1.0):
            now = _place_of(self._trains_in)
            if now != place or not _is_in_operation(self._trains_in):
                since, place = time.monotonic(), now
            elif time.monotonic() - since > _ABORT_S:
                self._on_stuck(
                    f"an operation did not end within {_ABORT_S:.0f} s after its process group was "
                    "aborted, as a worker is lost"
                )


def began_with() -> int | None:
    """With how many workers the elastic job began that this process is a worker of; None where it
    is of no elastic job."""
    return int(os.environ.get(ELASTIC) or 0) or None


def _place_of(thread: int) -> list[tuple[int, int]]:
    """Where a thread of this process is: its frames, and the instruction in each."""
    frame, found = sys._current_frames().get(thread), []
    while frame is not None:
        found.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return found


def _is_in_operation(thread: int) -> bool:
    """Whether a thread is in PyTorch or this package, and not in the user's own code."""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.", "allhands.")
    )


def _is_nccl() -> bool:
    state = group.state()
    return state is not None and state.world.backend == "nccl"


def _shared_store() -> Any:
    state = group.state()
    assert state is not None
    store = state.store.clone()
    store.set_timeout(timedelta(seconds=30))
    return store


def _regroup(epoch: int, rank: int, size: int, superseded: Callable[[], bool]) -> World:
    state = group.state()
    assert state is not None
    assert state.member is not None
    import torch.distributed as dist

    own = state.store
    if state.world.backend == "nccl":
        # A thread may wait here for a rank that is gone, and with it all that use the connection.
        own = own.clone()
        own.set_timeout(timedelta(seconds=CONNECT_S))
    store = dist.PrefixStore(f"membership{epoch}", own)
    member = replace(state.member, rank=rank, world_size=size)
    seconds = state.request.timeout or DEFAULT_TIMEOUT.total_seconds()
    deadline = time.monotonic() + seconds
    members = group.meet_all(store, member, state.place, deadline, superseded)
    if state.set_ifname:  # for the members that there were
        os.environ.pop(interface.VARIABLE, None)
    state.set_ifname = interface.set_for_gloo(members, rank)
    world = state.world
    if superseded():
        raise SupersededError("the members of the world have changed again")
    # nccl gives up where the members change again; gloo has to be told for how long it waits.
    limit = seconds if world.backend == "nccl" else CONNECT_S
    layout = Layout(rank, size)
    try:
        group.make_group(store, world.backend, world.device, layout, limit, superseded)
    finally:
        state.made_group = dist.is_initialized()
    set_group_timeout(seconds)
    hosts = list(dict.fromkeys(other.host for other in members))
    told = {
        "rank": rank,
        "world_size": size,
        "local_world_size": sum(other.host == member.host for other in members),
        "node_rank": hosts.index(member.host),
    }
    for name, value in told.items():
        object.__setattr__(world, name, value)  # it is frozen for everybody else
    return world
