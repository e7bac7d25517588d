"""One server's part of a table of rows, and the round of pushes that is open."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import Any

import torch

from allhands.comm.clipping import square_of
from allhands.errors import UserError
from allhands.kvstore.bucket import weight_factor
from allhands.kvstore.optimizers import OptimizerSpec
from allhands.kvstore.parts import KeyPart, Meta, lead_of, within
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
    """What `pack_rows` packed.

    Raises:
        FrameError: the lengths do not fit.
    """
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


class RoundError(UserError):
    """A round cannot be closed, which ends the step of all who are in it."""


class TableRounds(KeyPart):
    """A table's rows on this server, its rounds, and who waits for rows."""

    def __init__(
        self, number: int, key: str, table: RowSparse, group: int, spec: OptimizerSpec | None
    ) -> None:
        super().__init__(number, key, group)
        self.table = table
        self.rows = RowTable(table, spec, group)
        self.mirror: Any = None  # what keeps a copy of the table
        self._arrived: dict[int, tuple[torch.Tensor, torch.Tensor, Meta]] = {}
        # Combined, and waiting for the norm of all keys; and whether it was told.
        self._held: tuple[torch.Tensor, torch.Tensor, list[Meta]] | None = None
        self._told = False
        self._early: dict[
            int, tuple[int, torch.Tensor, torch.Tensor, Meta]
        ] = {}  # of the round after the open one
        self._waiting: list[tuple[Any, int, torch.Tensor, int]] = []

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

    def push(
        self,
        number: int,
        meta: Meta,
        ids: torch.Tensor,
        rows: torch.Tensor,
        members: Any,
        synchronous: bool,
    ) -> list[Meta]:
        """A worker's rows for a round; the workers whose part is done with it.

        A worker that came again counts from a round on that may not be open yet here, while it is
        on another server.

        Raises:
            UserError: a second push in one round, or one of a later round than the next.
        """
        rank = meta.worker.rank
        with self.lock:
            if number <= (self.version if synchronous else self.last.get(rank, 0)):
                return [meta]
            self.last[rank] = number
            if not synchronous:
                self.clocks[rank] = self.clocks.get(rank, 0) + 1
                if meta.weight:  # else it had no samples, and there is nothing to apply
                    self._apply([(ids, rows, meta)])
                return [meta]
            if number > self.version + 2:
                raise UserError(
                    f"the key '{self.key}' is at version {self.version}; a push for {number} "
                    "cannot be placed; pull rows first"
                )
            if number == self.version + 2:
                self._early[rank] = (number, ids, rows, meta)
                return []
            if rank in self._arrived:
                raise UserError(
                    f"the key '{self.key}' was pushed twice in one round by worker {rank}; pull "
                    "rows before the next push"
                )
            self._arrived[rank] = (ids, rows, meta)
            return self._close(members)

    def newest(self, synchronous: bool) -> int:
        with self.lock:
            return self.version if synchronous else max(self.version, *self.last.values(), 0)

    def has_begun(self, number: int) -> bool:
        return self.version + 1 > number or (
            self.version + 1 == number and bool(self._arrived or self._held)
        )

    def drop(self) -> None:
        self._held = None
        for one in (self._arrived, self._early, self._waiting, self.last, self.clocks):
            one.clear()

    def look_again(self, members: Any) -> list[Meta]:
        """Close the round if it waited only for workers that are gone; who was in it."""
        with self.lock:
            return self._close(members) if self._arrived else []

    def held_square(self) -> tuple[int, int, float] | None:
        """Of a round that is combined and waits for `commit`: the step, this table's number, and
        the sum of squares; once."""
        with self.lock:
            if self._held is None or self._told:
                return None
            self._told = True
            _, rows, metas = self._held
            return metas[0].step, self.number, square_of(rows)

    def commit(self, scale: float) -> list[Meta]:
        """Apply what waits, multiplied; the workers whose part is done with it."""
        with self.lock:
            if self._held is None:
                return []
            (ids, rows, metas), self._held = self._held, None
            late = [
                meta for _, _, meta in self._arrived.values()
            ]  # of workers that are not counted in this round
            self._arrived.clear()
            if scale != 1.0:
                rows.mul_(scale)
            self._step(ids, rows, metas)
            return metas + late

    def _close(self, members: Any) -> list[Meta]:
        if (
            self._held is not None
            or not members.counted(self.key, self.version + 1) <= self._arrived.keys()
        ):
            return []
        arrived = [self._arrived[rank] for rank in sorted(self._arrived)]
        self._arrived.clear()
        try:
            if lead_of([meta for _, _, meta in arrived]).clip is not None:
                self._held, self._told = self._combined(arrived), False
                return []
            self._apply(arrived)
        except UserError as error:
            raise RoundError(f"the key '{self.key}': {error}") from error
        return [meta for _, _, meta in arrived]

    def _apply(self, pushes: list[tuple[torch.Tensor, torch.Tensor, Meta]]) -> None:
        self._step(*self._combined(pushes))

    def _combined(
        self, pushes: list[tuple[torch.Tensor, torch.Tensor, Meta]]
    ) -> tuple[torch.Tensor, torch.Tensor, list[Meta]]:
        metas = [meta for _, _, meta in pushes]
        ids, rows = sum_rows([(ids, rows) for ids, rows, _ in pushes])
        factor = weight_factor([meta.weight for meta in metas], lead_of(metas).expected)
        return ids, rows.mul_(factor) if factor != 1.0 else rows, metas

    def _step(self, ids: torch.Tensor, rows: torch.Tensor, metas: list[Meta]) -> None:
        options, mirror, ticket = lead_of(metas).options(self.group), self.mirror, None
        if mirror is not None:
            ticket = mirror.begin(self, options, len(metas), pack_rows(ids, rows))
        self.rows.push(ids, rows, options)
        self.version += 1
        if mirror is not None:  # before anybody hears of it
            mirror.settle(self, ticket)
        for rank in [
            rank for rank, (number, *_) in self._early.items() if number == self.version + 1
        ]:
            _, early_ids, early_rows, meta = self._early.pop(rank)
            self._arrived[rank] = (early_ids, early_rows, meta)
        self.serve()

    def repeat(self, payload: Any, said: Mapping[str, Any]) -> None:
        ids, rows = unpack_rows(payload, self.table, True)
        self.rows.push(ids, rows, said["options"])
        self.version += 1

    def serve(self, may: Collection[int] | None = None) -> None:
        """Answer those whose version is reached; and, where that is bounded, those of `may`
        only."""
        with self.lock:
            waiting, self._waiting = self._waiting, []
            for session, request, ids, version in waiting:
                if version <= self.version if may is None else session.rank in may:
                    session.give_rows(request, self.rows.pull(ids))
                else:
                    self._waiting.append((session, request, ids, version))

    def pull(
        self,
        session: Any,
        request: int,
        ids: torch.Tensor,
        version: int,
        rules: dict[str, Any],
        members: Any,
    ) -> None:
        """Send rows once the table has this version; with bounded staleness, once the worker is not
        too far ahead."""
        with self.lock:
            self._waiting.append((session, request, ids, version if rules["wait"] == "sync" else 0))
            self.serve(
                within(self.clocks, members.everyone(), rules["staleness"])
                if rules["wait"] == "ssp"
                else None
            )
