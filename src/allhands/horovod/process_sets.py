"""Sets of ranks that an operation takes place in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from allhands.errors import UserError


class ProcessSet:
    """Some ranks. It can be used after `add_process_set`, or as one of
    ``hvd.init(process_sets=[...])``.

    Args:
        ranks_or_comm: different ranks of the world, counted from 0.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        ranks = ranks_or_comm
        self.ranks: list[int] | None = sorted(int(rank) for rank in ranks)
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or self.ranks[0] < 0:
            raise UserError(
                f"ProcessSet({list(ranks)}): set ranks to one or more different ranks, counted "
                "from 0"
            )
        self.process_set_id: int | None = None
        self.group: Any = None  # of torch; None for a rank alone, and for ranks outside
        self._own = -1

    def size(self) -> int:
        """How many ranks it has."""
        return len(self._members())

    def rank(self) -> int:
        """Which of them this process is, counted from 0.

        Raises:
            UserError: none.
        """
        if not self.included():
            raise UserError(
                f"rank {self._own} is not in the process set {self._members()}; ask included() "
                "first"
            )
        return self._members().index(self._own)

    def included(self) -> bool:
        """Whether this process is one of them."""
        return self._own in self._members()

    def _members(self) -> list[int]:
        if self.process_set_id is None or self.ranks is None:
            raise UserError(
                "the global process set exists after hvd.init()"
                if self is global_process_set
                else f"the process set {self.ranks} is not in use; call hvd.add_process_set() with "
                "it on all ranks, or name it in hvd.init(process_sets=[...])"
            )
        return self.ranks

    def put_in_use(self, number: int, ranks: list[int], own: int, group: Any) -> None:
        """Called by the engine once all ranks know it."""
        self.process_set_id, self.ranks, self.group, self._own = number, ranks, group, own

    def put_away(self) -> None:
        """Called by the engine: it can be used no more."""
        self.process_set_id = self.group = None
        if self is global_process_set:
            self.ranks = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([0])
global_process_set.put_away()
