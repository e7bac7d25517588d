"""`KVStore`: named tensors that all workers share; pushes are combined, pulls read the result."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from allhands.errors import UserError
from allhands.kvstore.chunk_compression import both_ways
from allhands.kvstore.optimizers import OptimizerSpec, spec_from
from allhands.kvstore.shares import Share, Step
from allhands.kvstore.store_keys import Key, StoreKeys
from allhands.kvstore.store_modes import Mode
from allhands.kvstore.store_state import StoreState, read_states, write_states
from allhands.kvstore.values import RowSparse, check_first_rows, check_ids, one, several


class KVStore(StoreKeys, ABC):
    """Named tensors, shared by all workers. Made by `allhands.kvstore.create`.

    Keys are strings or whole numbers, one of both in one store. Methods that take a key also take a
    list of keys, with a list of values. A value is a tensor or a list of tensors, one for each
    device of this worker; those of a list are added up first.

    Attributes:
        mode: the kind of store.
        rank: this worker's number, 0 to num_workers - 1.
        num_workers: how many workers share the store.
    """

    mode: Mode
    rank: int
    num_workers: int

    def __init__(self, mode: Mode, rank: int, num_workers: int) -> None:
        super().__init__()
        self.mode, self.rank, self.num_workers = mode, rank, num_workers
        self.optimizer: OptimizerSpec | None = None
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def type(self) -> str:
        """The name that was given to `create`."""
        return self.mode.name

    # ---------------------------------------------- what the engines do, for one key and one tensor

    @abstractmethod
    def declare(
        self,
        named: Mapping[str, torch.Tensor | RowSparse],
        complete: bool = False,
        groups: Mapping[str, int] | None = None,
    ) -> None:
        """Make keys; their values are those of rank 0. To be called on every worker.

        Args:
            named: the values by key.
            complete: this is all that this worker will ever step over; a worker that declares
                another set is told so.
            groups: the optimizer's group of each key; keys that are not in it belong to group 0.
        """

    @abstractmethod
    def _push(self, name: str, value: torch.Tensor, priority: int, share: Share) -> None: ...

    @abstractmethod
    def _pull(self, name: str, out: torch.Tensor, priority: int) -> None: ...

    @abstractmethod
    def _pull_rows(self, name: str, ids: torch.Tensor, out: torch.Tensor) -> None:
        """`ids`: int64, shape [n], in any order and with repetitions. `out`: shape [n, columns]."""

    @abstractmethod
    def _set_optimizer(self, spec: OptimizerSpec) -> None: ...

    @abstractmethod
    def _set_compression(self, push: dict[str, Any], pull: dict[str, Any]) -> None: ...

    @abstractmethod
    def _compresses(self) -> bool:
        """Whether gradients are pushed in fewer bits."""

    @abstractmethod
    def _load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None: ...

    @abstractmethod
    def update(
        self,
        grads: Mapping[str, torch.Tensor],
        outs: Mapping[str, torch.Tensor],
        share: Share,
        groups: Sequence[Mapping[str, Any]] | None = None,
        clip_norm: float | None = None,
    ) -> Step:
        """Take one optimizer step over all keys of `grads`, and read the new weights into `outs`.

        Args:
            grads: by key; an empty mapping with a weight of 0 takes part without gradients.
            outs: where the new weights go, by key.
            share: how the gradients are weighed.
            groups: options of the optimizer's groups, from this step on: ``[{"lr": 0.01}]``. None
                leaves them as they are.
            clip_norm: bound of the L2 norm of the combined gradients of all keys.
        """

    @abstractmethod
    def reduce(self, grads: Mapping[str, torch.Tensor], share: Share) -> Step:
        """Replace the gradients by their combination over all workers, which all workers get
        alike."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all workers have come here."""

    @abstractmethod
    def state(self) -> StoreState:
        """The optimizer's state of all keys, as one process would have it."""

    @abstractmethod
    def load_state(self, state: StoreState) -> None:
        """Continue from `state`; to be called on every worker, with the same."""

    def close(self) -> None:
        """Leave the store."""

    def _check_optimizer(self, call: str) -> None:
        """Raise `UserError` where `call` needs an optimizer and there is none."""
        if self.optimizer is None:
            raise UserError(f"{call}: the store has no optimizer; call set_optimizer first")

    def _in_order(self, pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """The order in which the keys of a list are pushed, where that is the same on all workers
        by need."""
        return pairs

    # ------------------------------------------------------------------ the names that people know

    def init(self, key: Key | Sequence[Key], value: Any) -> None:
        """Make keys, once each. Every worker calls it; the values of rank 0 are taken.

        Args:
            key: a key, or a list of them.
            value: a tensor (or `RowSparse`), or a list with one for each key. A sparse tensor of
                rows, as `torch.sparse_coo_tensor(ids[None], rows, (table_rows, columns))`, makes a
                key of rows that begins with them, and with zeros in all other rows; no optimizer
                may be set before.

        Raises:
            UserError: the key is there already, or another worker made it with another shape.
        """
        pairs = self._pairs(key, value)
        for name, _ in pairs:
            if name in self.shapes or name in self.tables:
                raise UserError(f"the key '{name}' was initialised already; push to it instead")
        first = {
            name: value if isinstance(value, RowSparse) else one(value, name)
            for name, value in pairs
        }
        rows = {
            name: value
            for name, value in first.items()
            if isinstance(value, torch.Tensor) and value.is_sparse
        }
        check_first_rows(rows, self.mode, self.optimizer)
        tables = {
            name: RowSparse(value.shape[0], value.shape[1], dtype=value.dtype)
            for name, value in rows.items()
        }
        self.declare({**first, **tables})
        for name, given in sorted(rows.items()):
            self._assign_first(name, given.detach().coalesce())

    def _assign_first(self, name: str, rows: torch.Tensor) -> None:
        """Begin a table with rank 0's rows: without an optimizer, what all workers push is added up
        and assigned."""
        count = len(rows.values()) if self.rank == 0 else 0
        ids, values = rows.indices()[:, :count], rows.values()[:count]
        mine = torch.sparse_coo_tensor(
            ids, values, rows.shape, is_coalesced=True, check_invariants=False
        )
        self._push(name, mine, 0, Share())
        # Wait for each server, which has every n-th row: an optimizer that is set next must not
        # take a step with them.
        some = torch.arange(min(len(rows), 1024))
        self._pull_rows(name, some, values.new_empty(len(some), rows.shape[1]))

    def push(
        self, key: Key | Sequence[Key], value: Any, priority: int = 0, weight: float | None = None
    ) -> None:
        """Give this worker's values. What all workers push is added up; with an optimizer, the sum
        is the gradient.

        Args:
            key: a key, or a list of them.
            value: for each key a tensor (dense, or sparse_coo with rows for a `RowSparse` key), or
                a list with one a device.
            priority: larger ones are sent first.
            weight: how many samples the value stands for: the sum over the workers is then divided
                by the sum of their weights. None leaves the plain sum.

        Raises:
            UserError: no such key, another shape or dtype, or a second push before a pull (when
                synchronous).
        """
        share = Share() if weight is None else Share(weight, 1.0)
        for name, given in self._in_order(self._pairs(key, value)):
            self._push(name, self._check(name, given), int(priority), share)

    def pull(
        self,
        key: Key | Sequence[Key],
        out: Any = None,
        priority: int = 0,
        ignore_sparse: bool = True,
    ) -> Any:
        """Read values; sees this worker's own pushes, and when synchronous those of all workers.

        Args:
            key: a key, or a list of them.
            out: for each key a tensor or a list of tensors to write into; None returns new tensors.
            priority: larger ones are sent first.
            ignore_sparse: leave `RowSparse` keys out. False is refused for them: use
                `row_sparse_pull`.

        Returns:
            A tensor for each key when `out` is None.
        """
        names = self._names(key)
        given = (
            [None] * len(names) if out is None else [values for _, values in self._pairs(key, out)]
        )
        returned = []
        for name, target in zip(names, given, strict=True):
            if name in self.tables:
                if not ignore_sparse:
                    raise UserError(
                        f"'{name}' holds rows; read them with row_sparse_pull(key, out=…, "
                        "row_ids=…)"
                    )
                continue
            shape, dtype = self._known(name)
            outs = [torch.empty(shape, dtype=dtype)] if target is None else several(target, name)
            for tensor in outs:
                self._check_like(name, tensor, "out")
            self._pull(name, outs[0], int(priority))
            for tensor in outs[1:]:
                tensor.copy_(outs[0])
            returned.append(outs[0])
        if out is not None:
            return None
        return returned if isinstance(key, (list, tuple)) else returned[0]

    def pushpull(
        self,
        key: Key | Sequence[Key],
        value: Any,
        out: Any = None,
        priority: int = 0,
        weight: float | None = None,
    ) -> None:
        """`push`, then `pull` into `out`; into `value` when there is no `out`."""
        self.push(key, value, priority, weight)
        self.pull(key, value if out is None else out, priority)

    def buffer(self, key: Key) -> torch.Tensor:
        """Memory for values of a dense key: on the CPU, in the key's shape and dtype, zeros at
        first, always the same tensor.

        Servers of this host read it themselves, so that ``pushpull(key, store.buffer(key))``, with
        `out` or without, spares the copy that is made of other tensors. In all else it is a tensor
        like any other.
        """
        (name,) = self._names(key)
        shape, dtype = self._known(name)
        if name not in self._buffers:
            self._buffers[name] = torch.zeros(shape, dtype=dtype)
        return self._buffers[name]

    def broadcast(self, key: Key | Sequence[Key], value: Any, out: Any, priority: int = 0) -> None:
        """`init`, then `pull` into `out`: everyone gets rank 0's value."""
        self.init(key, value)
        self.pull(key, out, priority)

    def row_sparse_pull(
        self,
        key: Key,
        out: torch.Tensor | None = None,
        priority: int = 0,
        row_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read some rows of a `RowSparse` key.

        Args:
            key: the key.
            out: shape [len(row_ids), columns]; None makes one.
            priority: has no effect on rows, which are always read at once.
            row_ids: int64 numbers of rows, in any order, with repetitions if need be, possibly
                none.

        Returns:
            `out`; row i of it is the table's row ``row_ids[i]``.
        """
        (name,) = self._names(key)
        table = self.tables.get(name)
        if table is None:
            self._known(name)
            raise UserError(
                f"'{name}' is a dense tensor; read it with pull, or make it with init('{name}', "
                "RowSparse(rows, columns))"
            )
        if row_ids is None:
            raise UserError(f"row_sparse_pull('{name}') needs row_ids=…, a tensor of row numbers")
        ids = check_ids(name, row_ids.reshape(-1), table)
        if out is None:
            out = torch.empty(len(ids), table.columns, dtype=table.dtype)
        if out.shape != (len(ids), table.columns) or out.dtype != table.dtype:
            raise UserError(
                f"row_sparse_pull('{name}'): out has shape {list(out.shape)} and {out.dtype}; for "
                f"{len(ids)} row ids it must have [{len(ids)}, {table.columns}] and {table.dtype}"
            )
        self._pull_rows(name, ids, out)
        return out

    def set_optimizer(
        self,
        optimizer: str | OptimizerSpec | torch.optim.Optimizer,
        options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """From now on, pushed values are gradients, and the store takes optimizer steps with them.

        Args:
            optimizer: a name ("sgd", "adam"), what `allhands.kvstore.optimizer.create` gave, or a
                torch optimizer with one group.
            options: of the optimizer, under torch's names or MXNet's (`learning_rate`, `wd`, …).
            more: the same, as keywords.

        Raises:
            UserError: no such optimizer or option, or one whose update of one number depends on
                others.
        """
        self.optimizer = spec_from(optimizer, {**(options or {}), **more})
        self._set_optimizer(self.optimizer)

    def set_gradient_compression(self, compression_params: str | Mapping[str, Any]) -> None:
        """Send gradients in fewer bits; what is lost is added to the next ones (error feedback).

        Args:
            compression_params: MXNet's ``{"type": "2bit", "threshold": 0.5}``, or what
                ``compress=`` takes: fp16, bf16, int8, 1bit, 2bit or topk, or ``{"name": "topk",
                "keep": 0.01}``; "none" sends float32. "pull" says how weights come back: a name, or
                such a dict; without it as the gradients, with 2bit whole.

        Raises:
            UserError: no such codec or option, or another one than the other workers'.
        """
        push, pull = both_ways(compression_params, "set_gradient_compression(")
        self._set_compression(push, pull)

    @abstractmethod
    def residuals(self) -> dict[str, torch.Tensor]:
        """What compression has left over on this worker, by key: float32, 1-D; to be kept in its
        checkpoint."""

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `residuals` gave, on a worker of any store that compresses.

        Raises:
            UserError: the store does not compress, has no such key, or the key has another size.
        """
        if not self._compresses():
            raise UserError(
                "load_residuals: the store does not compress; call set_gradient_compression first"
            )
        for name, values in residuals.items():
            self._check_residual(name, values)
        self._load_residuals(residuals)

    def is_capable(self, capability: str) -> bool:
        """Whether the store can run the "optimizer"."""
        return capability.lower() == "optimizer"

    def save_optimizer_states(
        self, fname: str | os.PathLike[str], dump_optimizer: bool = False
    ) -> None:
        """Write the optimizer's state of all keys into one safetensors file. To be called on every
        worker; rank 0 writes.

        Args:
            fname: the file.
            dump_optimizer: also write the optimizer's name and options.
        """
        self._check_optimizer("save_optimizer_states")
        state = self.state()
        if self.rank == 0:
            write_states(fname, state, self.optimizer if dump_optimizer else None)
        self.barrier()

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Continue with the state that `save_optimizer_states` wrote, with any number of workers
        and servers."""
        state, spec = read_states(fname)
        if spec is not None and self.optimizer is None:
            self.set_optimizer(spec)
        self._check_optimizer("load_optimizer_states")
        self.load_state(state)

    def _barrier(self) -> None:
        self.barrier()
