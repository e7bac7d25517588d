"""What may be pushed, and the checks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allhands.errors import UserError
from allhands.kvstore.store_modes import Mode


@dataclass(frozen=True)
class RowSparse:
    """A table of rows that are made when they are first touched, to be given to `KVStore.init` in
    place of a tensor.

    Attributes:
        rows: how many there may be; ids are 0 to rows - 1, and may lie beyond 2**31.
        columns: numbers in a row.
        std: rows begin as normal numbers with this standard deviation, drawn from (seed, id); 0
            begins with zeros.
        seed: of the first values.
        dtype: of the numbers.
    """

    rows: int
    columns: int
    std: float = 0.0
    seed: int = 0
    dtype: torch.dtype = torch.float32


def check_rows(name: str, value: torch.Tensor, table: RowSparse) -> None:
    if value.layout != torch.sparse_coo or value.sparse_dim() != 1 or value.dense_dim() != 1:
        raise UserError(
            f"'{name}' holds rows; push a sparse tensor of them, such as the gradient of "
            "nn.Embedding(…, sparse=True), or "
            "torch.sparse_coo_tensor(ids[None], rows, (table_rows, columns))"
        )
    if (
        value.shape[1] != table.columns
        or value.shape[0] != table.rows
        or value.dtype != table.dtype
    ):
        raise UserError(
            f"the value for '{name}' has shape {list(value.shape)} and {value.dtype}, but the "
            f"table has [{table.rows}, {table.columns}] and {table.dtype}"
        )
    check_ids(name, value._indices()[0], table)


def check_first_rows(values: Mapping[str, torch.Tensor], mode: Mode, optimizer: object) -> None:
    """Raise `UserError` unless a store can begin tables with these sparse tensors."""
    for name, value in values.items():
        if value.layout != torch.sparse_coo or value.sparse_dim() != 1 or value.dense_dim() != 1:
            raise UserError(
                f"init('{name}'): a sparse value is rows of a table; write "
                "torch.sparse_coo_tensor(ids[None], rows, (table_rows, "
                "columns)), or RowSparse(rows, columns)"
            )
        if not value.is_floating_point():
            raise UserError(
                f"init('{name}'): a table holds floating-point numbers, not {value.dtype}"
            )
        if optimizer is not None:
            raise UserError(
                f"init('{name}') with given rows comes before set_optimizer, which would take a "
                "step with them"
            )
        if mode.wait != "sync":
            raise UserError(
                f"init('{name}') with given rows needs a synchronous store; create('{mode.name}') "
                "is none. Write "
                f"init('{name}', RowSparse(rows, columns, std=…)), or create('dist_sync')"
            )


def check_ids(name: str, ids: torch.Tensor, table: RowSparse) -> torch.Tensor:
    """The row ids as int64."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(
            f"row ids for '{name}' are {ids.dtype}; they must be int64 (floats lose ids beyond "
            "2**24)"
        )
    ids = ids.to(torch.int64)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= table.rows):
        raise UserError(
            f"row ids for '{name}' go from {int(ids.min())} to {int(ids.max())}; the table has "
            f"rows 0 to {table.rows - 1}"
        )
    return ids


def sum_on_one_device(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of the list, on the first one's device; the tensor itself when there is
    one."""
    total = values[0].detach()
    for position, value in enumerate(values[1:]):
        moved = value.detach().to(total.device)
        total = total + moved if position == 0 else total.add_(moved)
    return total


def several(value: Any, name: str) -> list[torch.Tensor]:
    """The tensors of a value, one for each device. Raises `UserError` when it is something else."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not values or not all(isinstance(one, torch.Tensor) for one in values):
        raise UserError(
            f"the value for '{name}' must be a tensor, or a list of tensors with one for each "
            "device"
        )
    return values


def one(value: Any, name: str) -> torch.Tensor:
    """The tensor of a value, or the first of several, without its graph."""
    return several(value, name)[0].detach()
