"""Who takes part in an elastic job. Only the launcher decides it, so that no two groups of workers
can each go on without the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from allhands.world.regroup import KEY


class ElasticMembers:
    """The workers that train together, by the ranks under which they were started.

    A worker that is lost leaves at once. One that asks to join is taken in where one is missing, or
    where it was added, and once the others have taken up the last change. Where several hold a
    model in parts, those that hold a copy of it together leave together, and so many are taken in
    at once as make a copy.

    Args:
        publish: writes a value under a key of the workers' store.
    """

    def __init__(self, publish: Callable[[str, str], None]) -> None:
        self._publish = publish
        self.epoch = self._taken = 0
        #: The last change in which they have repeated what a loss had interrupted.
        self.repeated = 0
        self.ranks: list[int] = []
        self._size = 0
        self._waiting: list[int] = []
        self._just_joined: list[int] = []  # in the last change, which nobody has taken up yet
        self._spares: set[int] = set()
        self._added: set[int] = set()  # and have not been taken in
        self._new: set[int] = set()  # that were taken in, and have not begun to train
        self._lost: list[str] = []  # since the last change that was taken up
        # So many workers hold a model together, in so many runs of consecutive ones.
        self.copy_size = self._copy_runs = 1
        self._apart: set[int] = set()  # that live, and whose copy has lost another worker

    def begin(self, ranks: Sequence[int], spares: Sequence[int]) -> None:
        """The workers start anew; `spares` are started too, and take part once one is missing."""
        self.ranks = [rank for rank in ranks if rank not in spares]
        self.epoch = self._taken = self.repeated = 0
        self._size = len(self.ranks)
        self._spares, self._added = set(spares), set()
        self._waiting, self._just_joined, self._lost, self._new = [], [], [], set()
        self.copy_size = self._copy_runs = 1
        self._apart = set()

    @property
    def is_taken_up(self) -> bool:
        """Whether the workers train as the last change says."""
        return self._taken == self.epoch

    def lay_out(self, copy_size: int, copy_runs: int) -> None:
        """The members hold a model in parts: so many of them hold it once, in so many runs of
        consecutive members, each of which is followed by the runs of the other copies."""
        self.copy_size, self._copy_runs = copy_size, copy_runs

    def _copies(self) -> list[list[int]]:
        """The members by the copy of the model that they hold together."""
        run = self.copy_size // self._copy_runs
        count = max(1, len(self.ranks) // self.copy_size)
        copies: list[list[int]] = [[] for _ in range(count)]
        for place, rank in enumerate(self.ranks):
            copies[place // run % count].append(rank)
        return copies

    def left_without(self, gone: Collection[int]) -> list[int]:
        """The members of the copies that none of `gone` is of."""
        return [
            rank for copy in self._copies() if not any(r in gone for r in copy) for rank in copy
        ]

    def add(self, ranks: Sequence[int]) -> None:
        """Workers are started that do not take the place of others."""
        self._added |= set(ranks)

    def is_spare(self, rank: int) -> bool:
        """Whether a worker takes part only once another is missing."""
        return rank in self._spares and rank not in self.ranks

    def trains(self, rank: int) -> bool:
        """Whether a worker is a member, and has begun to train with the others."""
        return rank in self.ranks and rank not in self._new

    def lose(self, rank: int, why: str, at_end: bool = False) -> list[int]:
        """A worker's process is gone; `at_end`: it has done all that it had to.

        Returns:
            Those that leave with it, as they hold parts of the same copy of the model.
        """
        self._added.discard(rank)
        self._apart.discard(rank)
        if rank in self._waiting:
            self._waiting.remove(rank)
        if rank not in self.ranks:
            return []
        # A change is either a loss, which cannot wait, or an arrival, which waits for a step's end.
        for other in self._just_joined:
            self.ranks.remove(other)
            if other != rank:
                self._waiting.append(other)
        apart = []
        if rank in self.ranks:
            left = self.left_without([rank])
            if at_end:
                left = [other for other in self.ranks if other != rank]
            apart = [other for other in self.ranks if other not in left and other != rank]
            self.ranks = [other for other in self.ranks if other in left]
        self._apart |= set(apart)
        named = ", ".join(map(str, apart))
        with_it = f", and with it rank{'s' * (len(apart) > 1)} {named} of its copy of the model"
        self._lost.append(why + with_it * bool(apart))
        self._announce([])
        return apart

    def ask_to_join(self, rank: int) -> None:
        """A worker that was started later, or is a spare, could take part."""
        self._waiting.append(rank)
        self._take_in()

    def take_up(self, rank: int, epoch: int, repeated: bool = False) -> None:
        """A worker trains as the change of this number says, and has perhaps repeated what was
        interrupted."""
        self._new.discard(rank)
        if repeated:
            self.repeated = max(self.repeated, epoch)
        if epoch > self._taken:
            self._taken = epoch
            if self.is_taken_up:
                self._lost, self._just_joined = [], []
        self._take_in()

    def _take_in(self) -> None:
        if not (self._waiting and self.is_taken_up and self.ranks):
            return
        added = [rank for rank in self._waiting if rank in self._added]
        missing = max(0, self._size - len(self.ranks) - len(added))
        joined = added + [rank for rank in self._waiting if rank not in added][:missing]
        del joined[len(joined) // self.copy_size * self.copy_size :]
        if joined:
            self._waiting = [rank for rank in self._waiting if rank not in joined]
            self._added -= set(joined)
            runs = zip(self._runs(self.ranks), self._runs(joined), strict=True)
            self.ranks = [rank for those, more in runs for rank in (*those, *more)]
            self._size = max(self._size, len(self.ranks))
            self._announce(joined)

    def _runs(self, ranks: list[int]) -> list[list[int]]:
        """Workers that hold whole copies, in as many parts as the ranks of a copy are in."""
        size = len(ranks) // self._copy_runs
        return [ranks[size * number : size * (number + 1)] for number in range(self._copy_runs)]

    def _announce(self, joined: list[int]) -> None:
        self.epoch += 1
        self._just_joined = joined
        self._new = {rank for rank in self._new if rank in self.ranks} | set(joined)
        change: dict[str, Any] = {
            "epoch": self.epoch,
            "members": self.ranks,
            "lost": self._lost,
            "joined": joined,
        }
        if self._apart:
            change["apart"] = sorted(self._apart)
        self._publish(f"{KEY}/{self.epoch}", json.dumps(change))
