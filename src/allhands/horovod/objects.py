"""Objects that travel: written by torch.save and read as checkpoints are, with
``weights_only=True``, so that nothing that comes over the network can run."""

from __future__ import annotations

import codecs
import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allhands.errors import UserError

_multiarray: Any = (getattr(np, "_core", None) or np.core).multiarray  # renamed by numpy 2
# Besides what torch allows: numpy's arrays, and plain values that pickle makes by calling their
# type.
_ALLOWED: list[Any] = [
    bytes,
    bytearray,
    complex,
    frozenset,
    range,
    slice,
    codecs.encode,
    _multiarray._reconstruct,
    _multiarray.scalar,
    np.ndarray,
    np.dtype,
    *{
        type(np.dtype(name))
        for name in (
            "bool",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
        )
    },
    *{
        type(np.dtype(name))
        for name in ("float16", "float32", "float64", "complex64", "complex128")
    },
]
_REFUSED = b"refused "


def pack(obj: Any) -> torch.Tensor:
    """The object as bytes (uint8). One that cannot be read becomes the reason, which `unpack`
    raises on all ranks."""
    file = io.BytesIO()
    try:
        torch.save(obj, file)
        _load(file.getvalue())
        data = file.getvalue()
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        holds = f"it holds the class {found[1]}" if found else f"{type(error).__name__}: {error}"
        data = _REFUSED + f"an object of type {type(obj).__name__} cannot travel ({holds})".encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack(data: torch.Tensor) -> Any:
    """The object that `pack` wrote.

    Raises:
        UserError: it holds something other than plain values, containers, tensors and numpy arrays.
    """
    raw = data.numpy().tobytes()
    if raw.startswith(_REFUSED):
        raise UserError(
            f"{raw[len(_REFUSED) :].decode()}. Objects may hold plain values, lists, tuples, "
            "dicts, sets, tensors and numpy arrays; give a state_dict() or vars() of it, or allow "
            "its class on all ranks with torch.serialization.add_safe_globals([...])"
        )
    return _load(raw)


def _load(raw: bytes) -> Any:
    with torch.serialization.safe_globals(_ALLOWED):
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)


def write(obj: Any, path: Path) -> None:
    """Write an object to a file that `read` reads, and see to it that it is on the disk."""
    with path.open("wb") as file:
        torch.save(obj, file)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Any:
    """The object that `write` wrote; with what `unpack` allows."""
    return _load(path.read_bytes())
