"""The keys of a store without servers: buckets, of which each worker has a part, and tables of
rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from allhands.errors import UserError
from allhands.kvstore.bucket import KeyBucket
from allhands.kvstore.narrow import Narrow, Swap
from allhands.kvstore.optimizers import OptimizerSpec
from allhands.kvstore.row_table import RowTable, sum_rows
from allhands.kvstore.store import KVStore, Share
from allhands.kvstore.store_modes import Mode
from allhands.kvstore.values import RowSparse

Rows = tuple[torch.Tensor, torch.Tensor]
_RESTS = 8  # into which a bucket is cut where one key is taken out


class LocalKeys(KVStore):
    """The keys of a `LocalStore`, and what its workers do together, who are several in a
    `CollectiveStore`.

    Args:
        mode: what `create` was given.
        rank, num_workers: who takes part.
        device: where all values are kept; None: where they are when they are declared.
        twice: each worker also updates the part of the one before it, to the same bits. Keys are
            dense then, and nothing is compressed.
    """

    def __init__(
        self,
        mode: Mode,
        rank: int = 0,
        num_workers: int = 1,
        device: torch.device | None = None,
        twice: bool = False,
    ) -> None:
        super().__init__(mode, rank, num_workers)
        self._device, self._twice = device, twice
        self._buckets: dict[str, KeyBucket] = {}
        self._rows: dict[str, Table] = {}
        self._unread: set[str] = set()
        self._steps = 0
        self._present = num_workers
        self._reduced: tuple[dict[str, Any], list[KeyBucket]] = {}, []
        self._narrow: Narrow | None = None

    # -------------------------------------------------------- what CollectiveStore does with others

    def _meet(self, call: str, about: Any, share: Share | None = None) -> list[float]:
        """Make sure that all workers make this call with these arguments; returns their weights, by
        rank."""
        return [share.weight if share else 0.0]

    def _meet_in_step(self, about: list[Any], share: Share) -> tuple[list[Any], list[float]]:
        """The same for `update`, in which a worker without keys does what the others do; returns
        also what that is."""
        return about, self._meet("update", about, share)

    def _agree_on_keys(self, forms: dict[str, str]) -> None:
        """Make sure that all workers declare these keys; `forms` say what each of them is."""

    def _take_first(self, values: torch.Tensor) -> None:
        """Overwrite `values` with those of rank 0."""

    def _sum(self, values: torch.Tensor, bucket: KeyBucket) -> torch.Tensor:
        """This rank's part of the sum over the workers, of a tensor as long as the bucket."""
        return values

    def _gather(self, bucket: KeyBucket, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Put the parts of all ranks together, which are cut as the bucket is."""
        if bucket.layout is not None:
            bucket.put_together(self._swap([part] * self.num_workers), whole)
        elif part.data_ptr() != whole.data_ptr():
            whole.copy_(part)

    def _total(self, number: float) -> float:
        """The sum over the workers."""
        return number

    def _swap(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send the n-th tensor to rank n; returns what each rank sent here."""
        return list(tensors)

    # ------------------------------------------------------------------ keys

    def declare(
        self,
        named: Mapping[str, torch.Tensor | RowSparse],
        complete: bool = False,
        groups: Mapping[str, int] | None = None,
    ) -> None:
        forms = {}
        for name in sorted(named):
            if name in self.shapes or name in self.tables:
                raise UserError(
                    f"the key '{name}' is in the store already; make a new store for another "
                    "training"
                )
            forms[name] = _form(named[name], (groups or {}).get(name, 0))
        self._agree_on_keys(forms)
        alike: dict[tuple[str, int, str], list[str]] = defaultdict(list)
        for name in forms:
            value = named[name]
            if isinstance(value, RowSparse):
                self.tables[name] = value
                self._rows[name] = Table(
                    value,
                    self.optimizer,
                    (groups or {}).get(name, 0),
                    self.rank,
                    self.num_workers,
                    self._swap,
                )
            else:
                self.shapes[name] = (value.shape, value.dtype)
                place = str(self._device or value.device)
                alike[str(value.dtype), (groups or {}).get(name, 0), place].append(name)
        for (_, group, place), names in sorted(alike.items()):
            values: dict[str, torch.Tensor] = {name: named[name] for name in names}  # type: ignore[misc]
            bucket = self._bucket(values, group, torch.device(place))
            self._take_first(bucket.whole)
            bucket.take_values()
            self._add(bucket)

    def _bucket(
        self, values: Mapping[str, torch.Tensor], group: int, device: torch.device
    ) -> KeyBucket:
        layout = self._narrow.layout(values) if self._narrow is not None else None
        made = KeyBucket(values, group, device, self.rank, self.num_workers, layout)
        if self._twice and self.num_workers > 1:
            made.keep_twin((self.rank - 1) % self.num_workers)
        return made

    def _add(self, bucket: KeyBucket) -> None:
        for name in bucket.names:
            self._buckets[name] = bucket

    def _buckets_of(self, names: Iterable[str]) -> list[KeyBucket]:
        """The buckets that hold these keys and no others. A bucket that also holds others is cut
        for good.

        All workers ask for the same keys, so that all of them cut alike. One key alone is followed
        by others where keys are pushed one by one, so the rest is cut, too: to cut a key off the
        rest each time would take time that grows with the square of their number.
        """
        wanted = set(names)
        found = []
        for bucket in each(self._buckets[name] for name in sorted(wanted)):
            asked = [name for name in bucket.names if name in wanted]
            if len(asked) < len(bucket.names):
                others = [name for name in bucket.names if name not in wanted]
                length = -(-len(others) // _RESTS) if len(wanted) == 1 else len(others)
                rests = [others[first : first + length] for first in range(0, len(others), length)]
                found.append(self._cut(bucket, [asked, *rests])[0])
            else:
                found.append(bucket)
        return found

    def _cut(self, bucket: KeyBucket, pieces: Sequence[Sequence[str]]) -> list[KeyBucket]:
        tensors, numbers = self._state_of(bucket)
        true = bucket.views
        if bucket.layout is not None:  # the workers have something else
            self._gather(bucket, bucket.part, whole := torch.empty_like(bucket.whole))
            true = bucket.cut(whole)
        made = []
        for names in pieces:
            new = self._bucket(
                {name: bucket.views[name] for name in names}, bucket.group, bucket.whole.device
            )
            values = new.filled(true, torch.empty_like(new.whole))
            for one in new.held:
                one.part.copy_(one.own(values))
            if bucket.optimizer is not None:
                assert self.optimizer is not None
                new.load(
                    {name: {key: tensors[name][key] for key in names} for name in tensors},
                    numbers,
                    self.optimizer,
                )
            self._add(new)
            made.append(new)
        return made

    def _state_of(
        self, bucket: KeyBucket
    ) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, float]]:
        """The optimizer's state of a bucket: tensors by the state's name, then by key; and
        numbers."""
        if bucket.optimizer is None:
            return {}, {}
        tensors, numbers = bucket.optimizer.state()
        found = {}
        for name, part in sorted(tensors.items()):
            whole = part.new_empty(len(bucket.whole))
            self._gather(bucket, part, whole)
            found[name] = bucket.cut(whole)
        return found, numbers


def _form(value: torch.Tensor | RowSparse, group: int = 0) -> str:
    """What a key is, in words that are compared over the workers."""
    if isinstance(value, RowSparse):
        return repr(value)
    if value.layout != torch.strided or not value.is_floating_point():
        kind = str(value.dtype) if value.layout == torch.strided else "a sparse tensor"
        raise UserError(
            f"a value of a store must be a dense tensor of floating-point numbers, not {kind}"
        )
    return f"shape {list(value.shape)} of {value.dtype}" + (f" in group {group}" if group else "")


def each(buckets: Iterable[KeyBucket]) -> list[KeyBucket]:
    """The buckets, each once."""
    return list({id(bucket): bucket for bucket in buckets}.values())


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
