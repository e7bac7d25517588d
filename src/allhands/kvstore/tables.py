"""`Table`: a worker's part of the rows of a `RowSparse` key, where there are no servers. Row `id`
belongs to rank ``id % N``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allhands.kvstore.optimizers import OptimizerSpec
from allhands.kvstore.row_table import RowTable, sum_rows
from allhands.kvstore.values import RowSparse

Rows = tuple[torch.Tensor, torch.Tensor]
# Sends the n-th tensor to rank n; returns what each rank sent here. Only the first dimension may
# differ.
Swap = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class Table:
    """The rows of one key that this rank owns; they lie on the CPU.

    Args:
        table: what the key is.
        spec: the optimizer, if there is one yet.
        group: the optimizer's group of this key.
        rank, parts: row `id` is owned by rank ``id % parts``.
        swap: how the ranks exchange rows.
    """

    def __init__(
        self,
        table: RowSparse,
        spec: OptimizerSpec | None,
        group: int,
        rank: int,
        parts: int,
        swap: Swap,
    ) -> None:
        self.group = group
        self._table, self._rank, self._parts, self._swap = table, rank, parts, swap
        self._spec = spec
        self._rows = RowTable(table, spec, group)

    def set_optimizer(self, spec: OptimizerSpec) -> None:
        """Update rows with another optimizer from now on; the rows stay."""
        self._spec = spec
        self._rows.set_optimizer(spec, self.group)

    def combined(self, value: torch.Tensor | None, factor: float) -> Rows:
        """The sum over the workers of what each pushes, for the rows that this rank owns. All ranks
        call it.

        Args:
            value: a sparse_coo tensor of rows; None for nothing.
            factor: by what the sum is multiplied.

        Returns:
            Ascending ids, shape [n], and rows, shape [n, columns].
        """
        if value is None:
            ids = torch.empty(0, dtype=torch.int64)
            rows = torch.empty(0, self._table.columns, dtype=self._table.dtype)
        else:
            ids, rows = value._indices()[0].cpu(), value._values().detach().cpu()
        owned = self._owned(ids)
        got_ids = self._swap([ids[mine] for mine in owned])
        got_rows = self._swap([rows[mine] for mine in owned])
        ids, rows = sum_rows(list(zip(got_ids, got_rows, strict=True)))
        return ids, rows.mul_(factor) if factor != 1.0 else rows

    def step(self, found: Rows, options: Mapping[str, Any] | None) -> None:
        """Update, or without an optimizer assign, the rows that `combined` found."""
        self._rows.push(*found, options)

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of any ids, from whoever owns them; shape [len(ids), columns]. All ranks call
        it, each with its own ids."""
        unique, places = torch.unique(ids.cpu(), return_inverse=True)
        owned = self._owned(unique)
        asked = self._swap([unique[mine] for mine in owned])
        answers = self._swap([self._rows.pull(one) for one in asked])
        found = torch.empty(len(unique), self._table.columns, dtype=self._table.dtype)
        for mine, rows in zip(owned, answers, strict=True):
            found[mine] = rows
        return found[places]

    def state(self) -> dict[str, torch.Tensor]:
        """The rows and states of all ranks, in the order of ids. All ranks call it."""
        parts = self._rows.state()
        whole = {name: torch.cat(self._swap([part] * self._parts)) for name, part in parts.items()}
        order = whole["ids"].argsort()
        return {name: found[order] for name, found in whole.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` gave, with any number of ranks; nothing is the beginning."""
        if not state:
            self._rows = RowTable(self._table, self._spec, self.group)
            return
        mine = state["ids"] % self._parts == self._rank
        self._rows.load({name: found[mine] for name, found in state.items()})

    def _owned(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return [ids % self._parts == rank for rank in range(self._parts)]
