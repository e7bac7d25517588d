"""The keys of a store, dense and of rows, and the checks of what is passed for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from allhands.errors import UserError
from allhands.kvstore.chunk_compression import compressible
from allhands.kvstore.values import RowSparse, check_rows, several, sum_on_one_device

Key = str | int
Gradients = dict[str, torch.Tensor]


class StoreKeys:
    """What a `KVStore` knows of its keys.

    Attributes:
        shapes: of dense keys.
        tables: the keys that hold rows.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self.tables: dict[str, RowSparse] = {}
        self._key_type: type | None = None

    def _names(self, key: Key | Sequence[Key]) -> list[str]:
        keys = list(key) if isinstance(key, (list, tuple)) else [key]
        for item in keys:
            if isinstance(item, bool) or not isinstance(item, (str, int)):
                raise UserError(f"{item!r} is no key; keys are strings or whole numbers")
            kind = str if isinstance(item, str) else int
            if self._key_type not in (None, kind):
                raise UserError(
                    f"the key {item!r} is a {kind.__name__}, but this store's keys are of type "
                    f"{self._key_type.__name__}"
                )
            self._key_type = kind
        if len(set(keys)) < len(keys):
            raise UserError(f"a key is in the list twice: {keys}")
        return [str(item) for item in keys]

    def _pairs(self, key: Key | Sequence[Key], value: Any) -> list[tuple[str, Any]]:
        names = self._names(key)
        if not isinstance(key, (list, tuple)):
            return [(names[0], value)]
        if not isinstance(value, (list, tuple)) or len(value) != len(names):
            if isinstance(value, (list, tuple)):
                found = f"a list of {len(value)}"
            else:
                found = f"a {type(value).__name__}"
            raise UserError(
                f"for {len(names)} keys there must be a list of {len(names)} values, not {found}"
            )
        return list(zip(names, value, strict=True))

    def _known(self, name: str) -> tuple[torch.Size, torch.dtype]:
        if name not in self.shapes:
            known = ", ".join(list(self.shapes)[:10]) or "none"
            raise UserError(
                f"there is no key '{name}' in the store; call init('{name}', value) first. Keys: "
                f"{known}"
            )
        return self.shapes[name]

    def _check_like(self, name: str, tensor: torch.Tensor, what: str) -> None:
        shape, dtype = self._known(name)
        if tensor.shape != shape or tensor.dtype != dtype:
            raise UserError(
                f"{what} for the key '{name}' has shape {list(tensor.shape)} and {tensor.dtype}, "
                f"but the key was initialised with {list(shape)} and {dtype}"
            )

    def _check(self, name: str, given: Any) -> torch.Tensor:
        """The sum over the devices of what is pushed, of the right form."""
        table = self.tables.get(name)
        values = several(given, name)
        if table is not None:
            for value in values:
                check_rows(name, value, table)
            return sum_on_one_device(values).coalesce()
        for value in values:
            if value.layout != torch.strided:
                raise UserError(
                    f"the value for '{name}' is sparse, but the key is dense; make the key with "
                    f"init('{name}', RowSparse(rows, columns))"
                )
            self._check_like(name, value, "the value")
        return sum_on_one_device(values)

    def _check_gradients(self, grads: Mapping[str, torch.Tensor]) -> tuple[Gradients, Gradients]:
        """The gradients of dense keys, and those of rows, all of the right form."""
        dense, rows = {}, {}
        for name, grad in grads.items():
            if name in self.tables:
                check_rows(name, grad, self.tables[name])
                rows[name] = grad
            else:
                self._check_like(name, grad, "the gradient")
                dense[name] = grad
        return dense, rows

    def _check_all(self, values: Mapping[str, torch.Tensor], what: str) -> None:
        for name, value in values.items():
            self._check_like(name, value, what)

    def _check_residual(self, name: str, values: torch.Tensor) -> None:
        shape, dtype = self._known(name)
        if values.numel() != shape.numel() or not compressible(dtype):
            raise UserError(
                f"load_residuals: {values.numel()} numbers for '{name}', which has {shape.numel()} "
                f"of {dtype}; give what residuals() gave for this key"
            )
