"""One server's part of a table of rows, and the round of pushes that is open."""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Any

import torch

from allhands.comm.clipping import square_of
from allhands.kvstore.optimizers import OptimizerSpec
from allhands.kvstore.parts import KeyPart, StepWorker
from allhands.kvstore.row_table import RowTable, sum_rows
from allhands.kvstore.values import RowSparse
from allhands.kvstore.wire_frames import FrameError

_COUNT = struct.Struct("<Q")


def pack_rows(ids: torch.Tensor, rows: torch.Tensor | None) -> bytes:
    """How many, the ids, and the rows where there are some."""
    body = _COUNT.pack(len(ids)) + ids.contiguous().numpy().tobytes()
    return body if rows is None else body + rows.contiguous().view(torch.uint8).numpy().tobytes()


def unpack_rows(
    data: bytearray, table: RowSparse, with_rows: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `pack_rows` packed."""
    if len(data) < _COUNT.size:
        raise FrameError("rows without a count")
    count = _COUNT.unpack_from(data)[0]
    width = table.columns * table.dtype.itemsize if with_rows else 0
    if count > len(data) or len(data) != _COUNT.size + count * (8 + width):
        raise FrameError("rows of another length than was said")
    if count == 0:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, table.columns, dtype=table.dtype)
    ids = torch.frombuffer(data, dtype=torch.int64, count=count, offset=_COUNT.size)
    if int(ids.min()) < 0 or int(ids.max()) >= table.rows:
        raise FrameError("an id of no row")
    if not with_rows:
        return ids, torch.empty(0)
    start = _COUNT.size + 8 * count
    rows = (
        torch.frombuffer(data, dtype=torch.uint8, count=count * width, offset=start)
        .clone()
        .view(table.dtype)
    )
    return ids, rows.view(count, table.columns)


class TableRounds(KeyPart):
    """A table's rows on this server.

    A worker reads rows of some servers before its next push, which may so come to the others before
    their open round is closed.
    """

    beyond = 1

    def __init__(
        self, number: int, key: str, table: RowSparse, group: int, spec: OptimizerSpec | None
    ) -> None:
        super().__init__(number, key, group)
        self.table = table
        self.rows = RowTable(table, spec, group)
        self._pushes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._total: tuple[torch.Tensor, torch.Tensor] | None = None

    # ------------------------------------------------------------------ its state

    def form(self) -> list[Any]:
        table, dtype = self.table, str(self.table.dtype).removeprefix("torch.")
        rows = [table.rows, table.columns, table.std, table.seed]
        return [self.number, self.key, self.group, dtype, *rows]

    def set_optimizer(self, spec: OptimizerSpec | None) -> None:
        self.rows.set_optimizer(spec, self.group)

    def options(self) -> dict[str, Any] | None:
        return self.rows.options()

    def set_options(self, options: dict[str, Any]) -> None:
        self.rows.set_options(options)

    def state(self, whole: bool) -> dict[str, torch.Tensor]:
        return {name: one.detach().clone().contiguous() for name, one in self.rows.state().items()}

    def load(self, states: dict[str, torch.Tensor]) -> None:
        self.rows.load(states)
        self.changed_outside()

    # ------------------------------------------------------------------ rounds

    def newest(self, synchronous: bool) -> int:
        return self.version if synchronous else max(self.version, *self.last.values(), 0)

    def has_begun(self, number: int) -> bool:
        return self.version + 1 > number or (
            self.version + 1 == number and bool(self.arrived or self.added)
        )

    def add_up(self, awaited: Collection[int], ready: Collection[int], settled: bool) -> bool:
        if self.clipped or not settled or not ready or not set(ready) <= self.arrived.keys():
            return False
        for rank in sorted(ready):
            rows, meta, *_ = self.arrived.pop(rank)
            self._pushes.append(rows)
            self.added.append(meta)
        return True

    def combine(self) -> float:
        self._total, factor = sum_rows(self._pushes), self.factor()
        if factor != 1.0:
            self.multiply(factor)
        self.square = square_of(self._total[1]) if self.lead().clip is not None else None
        return self.square or 0.0

    def multiply(self, factor: float) -> None:
        assert self._total is not None
        self._total[1].mul_(factor)

    def payload(self) -> torch.Tensor | bytes:
        assert self._total is not None
        return pack_rows(*self._total)

    def set_payload(self, payload: bytearray) -> None:
        self._total = unpack_rows(payload, self.table, True)

    def apply(self, options: dict[str, Any] | None) -> None:
        assert self._total is not None
        self.rows.push(*self._total, options)

    def clear(self) -> None:
        self._pushes, self._total, self.added, self.clipped = [], None, [], False

    def drop(self) -> None:
        super().drop()
        self.last.clear()

    def give(self, worker: StepWorker, asked: Any) -> None:
        request, ids = asked
        worker.give_rows(request, self.rows.pull(ids))
