"""`Table`: a worker's part of the rows of a `RowSparse` key, where there are no servers. Row `id` belongs to rank ``id % N``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from allhands.kvstore.optimizers import OptimizerSpec
from allhands.kvstore.rows import RowTable, sum_rows
from allhands.kvstore.store import RowSparse

Rows = tuple[torch.Tensor, torch.Tensor]


class Swap(Protocol):
    """What a table needs of its store."""

    def _swap(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send the n-th tensor to rank n; returns what each rank sent here. Only the first dimension may differ."""


class Table:
    """The rows of one key that this rank owns.

    Args:
        table: what the key is.
        spec: the optimizer, if there is one yet.
        rank, parts: row `id` is owned by rank ``id % parts``.
        device: where the rows are.
    """

    def __init__(self, table: RowSparse, spec: OptimizerSpec | None, rank: int, parts: int) -> None:
        self._table, self._rank, self._parts = table, rank, parts
        self._rows = RowTable(table, spec)

    def set_optimizer(self, spec: OptimizerSpec) -> None:
        """Update rows with another optimizer from now on; the rows stay."""
        ...

    def combined(self, store: Swap, value: torch.Tensor | None, factor: float) -> Rows:
        """The sum over the workers of what each pushes for the rows that this rank owns.

        Args:
            store: the store.
            value: a coalesced sparse_coo tensor; None for nothing.
            factor: by what the sum is multiplied.

        Returns:
            Sorted ids, shape [n], and rows, shape [n, columns].
        """
        if value is None:
            ids = torch.empty(0, dtype=torch.int64)
            rows = torch.empty(0, self._table.columns, dtype=self._table.dtype)
        else:
            ids, rows = value.detach().indices()[0].cpu(), value.detach().values().cpu()
        owned = [ids % self._parts == rank for rank in range(self._parts)]
        got_ids = store._swap([ids[mine] for mine in owned])
        got_rows = store._swap([rows[mine] for mine in owned])
        ids, rows = sum_rows(list(zip(got_ids, got_rows, strict=True)))
        return ids, rows.mul_(factor) if factor != 1.0 else rows

    def step(self, found: Rows, options: Mapping[str, Any] | None) -> None:
        """Update, or without an optimizer assign, the rows that `combined` found."""
        self._rows.push(*found, options)

    def read(self, store: Swap, ids: torch.Tensor) -> torch.Tensor:
        """The rows of any ids, from whoever owns them; shape [len(ids), columns], on the CPU."""
        unique, places = torch.unique(ids.cpu(), return_inverse=True)
        owned = [unique % self._parts == rank for rank in range(self._parts)]
        asked = store._swap([unique[mine] for mine in owned])
        answers = store._swap([self._rows.pull(one) for one in asked])
        found = torch.empty(len(unique), self._table.columns, dtype=self._table.dtype)
        for mine, rows in zip(owned, answers, strict=True):
            found[mine] = rows
        return found[places]
