"""One operation of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class Form:
    """A tensor without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Operation:
    """An operation on tensors of certain shapes.

    Attributes:
        name: PyTorch's, such as ``aten.mm.default``.
        flops: floating point operations of matrix products, convolutions and attention; else 0.
        moved: bytes of what it reads and writes.
        width: bytes of a number of its narrowest floating point argument.
        function: PyTorch's.
        call: its arguments, with a `Form` for each tensor.
    """

    name: str
    flops: int
    moved: int
    width: int
    function: Any = field(default=None, compare=False, repr=False)
    call: Any = field(default=None, compare=False, repr=False)

    @cached_property
    def key(self) -> str:
        """Its name and arguments, under which its time is kept."""
        return f"{self.name}{_words(self.call)}"


def _words(value: Any) -> str:
    if isinstance(value, Form):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_words, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{name}={_words(one)}' for name, one in value.items())})"
    return repr(value)
