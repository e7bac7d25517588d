"""A server's table of rows that are made when they are first written, and the optimizer's state
beside each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from allhands.errors import UserError
from allhands.kvstore.optimizers import OptimizerSpec
from allhands.kvstore.row_updates import UPDATES
from allhands.kvstore.specs import changed, layout_of
from allhands.kvstore.values import RowSparse
from allhands.split_mix import STEP_SIGNED, mixed_tensor

_EMPTY = -1


class RowTable:
    """The rows of a `RowSparse` key that one server has, by id.

    Updates are lazy: an optimizer's step over some rows leaves all others, and their state, as they
    are. Weight decay and momentum therefore act on a row only when it is pushed (as
    torch.optim.SparseAdam does for Adam), and each row counts its own steps for what depends on
    them. A row that is in every push gets what torch's plain loop computes for it, bit for bit in
    float32 and float64.

    Memory is taken for rows that were pushed, and for those only: up to 1.5 times their numbers and
    states (and as much again while the table grows), and 40 to 72 bytes a row for finding and
    counting.

    Args:
        table: what the key is.
        spec: the optimizer; None assigns what is pushed. With ``multi_precision``, rows of 16 bits
            are kept and updated as float32.
        group: which of the optimizer's groups.

    Raises:
        UserError: an optimizer other than sgd, adagrad, adam, adamw and rmsprop.
    """

    def __init__(self, table: RowSparse, spec: OptimizerSpec | None = None, group: int = 0) -> None:
        self.table = table
        self._index = _Index()
        self._ids = torch.empty(0, dtype=torch.int64)
        self._rows = torch.empty(0, table.columns, dtype=table.dtype)
        self._states: dict[str, torch.Tensor] = {}
        self.set_optimizer(spec, group)

    def __len__(self) -> int:
        """Rows that were pushed."""
        return self._index.count

    def set_optimizer(self, spec: OptimizerSpec | None, group: int = 0) -> None:
        """Update with another optimizer from now on, from its first state; the rows stay."""
        if spec is not None and spec.name not in UPDATES:
            raise UserError(
                f"a RowSparse key cannot be updated by '{spec.name}'; write one of "
                f"{', '.join(UPDATES)}"
            )
        options = dict(spec.groups[group]) if spec is not None else {}
        wide = options.pop("multi_precision", False) and self.table.dtype in (
            torch.float16,
            torch.bfloat16,
        )
        self._spec, self._options, self._last = spec, options, dict[str, Any]()
        self._rows = self._rows.to(torch.float32 if wide else self.table.dtype)
        self._states = {name: self._first(name, len(self._rows)) for name in self._state_names()}

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Read rows. One that was never pushed has its first values, and takes no memory.

        Args:
            ids: int64, shape [n], in any order and with repetitions.

        Returns:
            Of the table's type, shape [n, columns].

        Raises:
            UserError: there are no such rows.
        """
        self._check(ids)
        slots = self._index.find(ids)
        absent = (slots < 0).nonzero().view(-1)
        if not len(absent):
            return self._rows.index_select(0, slots).to(self.table.dtype)
        out = torch.empty(len(ids), self.table.columns, dtype=self.table.dtype)
        out[absent] = first_rows(self.table, ids[absent])
        if len(absent) < len(ids):
            present = (slots >= 0).nonzero().view(-1)
            out[present] = self._rows.index_select(0, slots[present]).to(self.table.dtype)
        return out

    def push(
        self, ids: torch.Tensor, grads: torch.Tensor, options: Mapping[str, Any] | None = None
    ) -> None:
        """Take one optimizer step over these rows; without an optimizer, assign them.

        Args:
            ids: int64, shape [n], each once and in ascending order, as `sum_rows` gives them.
            grads: shape [n, columns].
            options: numbers of the optimizer's group from this step on: ``{"lr": 0.01}``.

        Raises:
            UserError: ids or shapes that cannot be, or an option that does not exist, cannot change
                or is out of range. Nothing has changed then.
        """
        self._check(ids)
        if len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
            raise UserError(
                "the ids of pushed rows must ascend, each of them once; add rows up with sum_rows "
                "first"
            )
        if grads.shape != (len(ids), self.table.columns):
            raise UserError(
                f"rows of shape {list(grads.shape)} for {len(ids)} ids; it must be "
                f"{[len(ids), self.table.columns]}"
            )
        if self._spec is not None and options and options != self._last:
            new = changed(self._spec.name, self._options, options)
            if new.get("momentum", 0) > 0 and "momentum_buffer" not in self._states:
                raise UserError(
                    f"{self._spec.name} began with momentum 0 and cannot get one later; set it "
                    "from the start"
                )
            self._options, self._last = new, dict(options)
        if not len(ids):
            return
        slots = self._made(ids)
        values = grads.detach().to("cpu", self._rows.dtype)
        if self._spec is None:
            self._rows[slots] = values
            return
        rows = self._rows.index_select(0, slots)
        states = {name: kept.index_select(0, slots) for name, kept in self._states.items()}
        states["step"] += 1
        UPDATES[self._spec.name](
            rows, -values if self._options["maximize"] else values, states, self._options
        )
        self._rows[slots] = rows
        for name, kept in self._states.items():
            kept[slots] = states[name]

    def options(self) -> dict[str, Any]:
        """The numbers of the optimizer's group as they are now; empty without an optimizer."""
        return self._options

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Go on with numbers that `options` gave."""
        self._options, self._last = dict(options), dict[str, Any]()

    def state(self) -> dict[str, torch.Tensor]:
        """All that was pushed, in the order of ids, as copies.

        Returns:
            "ids" (int64, shape [n]), "rows" (shape [n, columns]), with an optimizer "step" (int64,
            shape [n]: how often each row was pushed) and its states under torch's names, such as
            "exp_avg" (shape [n, columns]). What several servers have can be concatenated, and
            divided in other ways.
        """
        ids, order = self._ids[: len(self)].sort()
        found = {"ids": ids, "rows": self._rows.index_select(0, order)}
        return {
            **found,
            **{name: kept.index_select(0, order) for name, kept in self._states.items()},
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all rows by what `state` gave, in any order; without the optimizer's states,
        those begin anew.

        Raises:
            UserError: a part is missing, unknown or of another shape, or an id is there twice or
                beyond the table.
        """
        ids = state.get("ids")
        wanted = {"ids", "rows"}, {"ids", "rows", *self._states}
        if ids is None or set(state) not in wanted:
            raise UserError(
                f"a table's state has the parts {sorted(wanted[1])}, but there are {sorted(state)}"
            )
        self._check(ids)
        if len(torch.unique(ids)) < len(ids):
            raise UserError("the state of a table has an id twice")
        for name, value in state.items():
            shape = (len(ids),) if name in ("ids", "step") else (len(ids), self.table.columns)
            if value.shape != shape:
                raise UserError(
                    f"'{name}' in a table's state has shape {list(value.shape)}; it must be "
                    f"{list(shape)}"
                )
        self._index = _Index()
        self._ids, self._rows = self._ids[:0], self._rows[:0]
        self._states = {name: self._first(name, 0) for name in self._states}
        slots = self._made(ids.contiguous())
        self._rows[slots] = state["rows"].to(self._rows.dtype)
        for name, kept in self._states.items():
            if name in state:
                kept[slots] = state[name].to(kept.dtype)

    def _check(self, ids: torch.Tensor) -> None:
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise UserError(
                f"row ids are int64 in one dimension, not {ids.dtype} of shape {list(ids.shape)}"
            )
        if len(ids):
            least, most = (int(bound) for bound in torch.aminmax(ids))
            if least < 0 or most >= self.table.rows:
                raise UserError(
                    f"row ids go from {least} to {most}; the table has rows 0 to "
                    f"{self.table.rows - 1}"
                )

    def _state_names(self) -> list[str]:
        if self._spec is None:
            return []
        return [
            "step",
            *(
                name
                for name, number in layout_of(self._spec.name, self._options).items()
                if number is None
            ),
        ]

    def _first(self, name: str, count: int) -> torch.Tensor:
        """The states of rows that were never pushed."""
        if name == "step":
            return torch.zeros(count, dtype=torch.int64)
        value = self._options["initial_accumulator_value"] if name == "sum" else 0.0
        return torch.full((count, self.table.columns), value, dtype=self._rows.dtype)

    def _made(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots of these ids, which are different; those that are not there are made."""
        slots = self._index.find(ids)
        absent = (slots < 0).nonzero().view(-1)
        if len(absent):
            fresh, begin = ids[absent], len(self)
            end = begin + len(fresh)
            if end > len(self._ids):
                more = max(end, len(self._ids) * 3 // 2, 64) - len(self._ids)
                self._ids = torch.cat([self._ids, torch.empty(more, dtype=torch.int64)])
                self._rows = torch.cat(
                    [self._rows, torch.empty(more, self.table.columns, dtype=self._rows.dtype)]
                )
                self._states = {
                    name: torch.cat([kept, self._first(name, more)])
                    for name, kept in self._states.items()
                }
            self._ids[begin:end] = fresh
            self._rows[begin:end] = first_rows(self.table, fresh)
            slots[absent] = torch.arange(begin, end)
            self._index.add(fresh)
        return slots


def sum_rows(
    pushes: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up what several workers push.

    The floats of one row are added one after another: in the order of the list, and in one push in
    the order of its repetitions. It takes as many passes as the most frequent id has repetitions.

    Args:
        pushes: ids (int64, shape [n]) and rows (shape [n, columns]) of each worker; at least one,
            which may be empty.

    Returns:
        The ids, each once and ascending, and their sums; new tensors.
    """
    ids, order = torch.cat([ids for ids, _ in pushes]).sort(stable=True)
    rows = torch.cat([rows for _, rows in pushes])
    begins = torch.ones(len(ids), dtype=torch.bool)
    begins[1:] = ids[1:] != ids[:-1]
    first = begins.nonzero().view(-1)
    total = rows.index_select(0, order[first])
    left = (~begins).nonzero().view(-1)
    target = begins.long().cumsum(0)[left] - 1
    repetition = left - first[target]
    while len(left):
        now = repetition == 1
        total[target[now]] += rows.index_select(0, order[left[now]])
        left, target, repetition = left[~now], target[~now], repetition[~now] - 1
    return ids[first], total


# ---------------------------------------------------------------------- first values


def first_rows(table: RowSparse, ids: torch.Tensor) -> torch.Tensor:
    """The first values of rows, of the table's type: normal numbers that depend on (seed, id,
    column), and on nothing else.

    They are the Box-Muller transform of hashed counters, two columns from each hash, computed in
    float64 and rounded. Between machines whose logarithms and cosines differ, a last bit may,
    rarely.
    """
    if table.std == 0:
        return torch.zeros(len(ids), table.columns, dtype=table.dtype)
    pairs = -(-table.columns // 2)
    of_row = mixed_tensor(mixed_tensor(ids + 1) ^ mixed_tensor(torch.tensor(table.seed)))
    bits = mixed_tensor(of_row[:, None] + torch.arange(1, pairs + 1) * STEP_SIGNED)
    # Never 0, of which there is no logarithm.
    high = ((bits >> 32 & 0xFFFFFFFF).double() + 0.5) / 2**32
    low = (bits & 0xFFFFFFFF).double() * (2 * math.pi / 2**32)
    size = high.log_().mul_(-2).sqrt_()
    both = torch.stack((size * low.cos(), size * low.sin()), 2).view(len(ids), -1)
    return (both[:, : table.columns] * table.std).to(table.dtype)


class _Index:
    """From ids to slots 0, 1, 2, …: a hash table with open addresses, for many ids at once.

    A dict of Python takes some 100 bytes an id; a sorted array would be copied for each new one.
    """

    def __init__(self) -> None:
        self.count = 0
        self._ids = torch.full((1024,), _EMPTY)
        self._slots = torch.empty(1024, dtype=torch.int32)

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """The slot of each id, -1 where there is none; int64."""
        found = torch.full_like(ids, -1)
        mask = len(self._ids) - 1
        which, place = torch.arange(len(ids)), mixed_tensor(ids) & mask
        while len(which):
            there = self._ids[place]
            hit = there == ids
            found[which[hit]] = self._slots[place[hit]].long()
            go_on = ~hit & (there != _EMPTY)
            which, ids, place = which[go_on], ids[go_on], place[go_on] + 1 & mask
        return found

    def add(self, ids: torch.Tensor) -> None:
        """Give the next slots to different ids that are not there yet."""
        slots = torch.arange(self.count, self.count + len(ids), dtype=torch.int32)
        self.count += len(ids)
        if 2 * self.count > len(self._ids):
            kept = self._ids != _EMPTY
            ids, slots = torch.cat([self._ids[kept], ids]), torch.cat([self._slots[kept], slots])
            size = 1 << (2 * self.count - 1).bit_length()
            self._ids = torch.full((size,), _EMPTY)
            self._slots = torch.empty(size, dtype=torch.int32)
        mask = len(self._ids) - 1
        place = mixed_tensor(ids) & mask
        while len(ids):
            free = self._ids[place] == _EMPTY
            # Several may want one place; whose id is there after all have written has it.
            self._ids[place[free]] = ids[free]
            won = free & (self._ids[place] == ids)
            self._slots[place[won]] = slots[won]
            ids, slots, place = ids[~won], slots[~won], place[~won] + 1 & mask
