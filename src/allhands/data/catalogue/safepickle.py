"""Reading a pickle of plain values and numpy arrays without running anything that it says.

The python batches of CIFAR are pickles, and a pickle is a program: loaded in the ordinary way, a
file from anywhere can do anything. Here every name that it asks for is looked up in a table of four
stand-ins of our own, which only note what they are given; any other name is refused. The arrays are
then built from the notes, with their size checked.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from allhands.errors import UserError

_KINDS = {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"}


class _Dtype:
    """Notes the type that `numpy.dtype` was asked for, and the byte order of its state."""

    def __init__(self, kind: Any, *_: Any) -> None:
        self.kind = kind.decode("ascii") if isinstance(kind, bytes) else str(kind)
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        self.order = order.decode("ascii") if isinstance(order, bytes) else str(order)


class _Array:
    """Notes the state of a `numpy.ndarray`: version, shape, type, Fortran order, bytes."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def build(self) -> np.ndarray[Any, Any]:
        _, shape, dtype, fortran, data = self.state
        if (
            not isinstance(dtype, _Dtype)
            or dtype.kind not in _KINDS
            or dtype.order not in {"|", "<", ">", "="}
        ):
            raise pickle.UnpicklingError("an array of something other than numbers")
        raw = data.encode("latin1") if isinstance(data, str) else data
        values = np.frombuffer(
            raw, np.dtype(("" if dtype.order == "|" else dtype.order) + dtype.kind)
        )
        return values.reshape(shape, order="F" if fortran else "C")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _encode(text: str, *_: Any) -> bytes:
    return text.encode("latin1")  # how Python 3 writes bytes in protocol 2


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no data batch needs"
            ) from None


def load_batch(path: Path) -> dict[str, Any]:
    """The dictionary in the pickle at `path`: its keys as text, its values plain (text as bytes) or
    numpy arrays.

    Raises `UserError`, without having run anything, when the file is cut off, holds something else
    than a dictionary, or asks for any name but those of a numpy array.
    """
    try:
        # "bytes": Python 2's strings stay as they are, which is what array data was.
        read = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        if not isinstance(read, dict):
            raise pickle.UnpicklingError(f"it holds a {type(read).__name__}, not a dictionary")
        return {
            key.decode("latin1") if isinstance(key, bytes) else str(key): value.build()
            if isinstance(value, _Array)
            else value
            for key, value in read.items()
        }
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
        KeyError,
        MemoryError,
    ) as error:
        raise UserError(
            f"{path} ({path.stat().st_size:,} bytes) is not a whole data batch and was not loaded: "
            f"{error}. Get it again from its publisher."
        ) from None
