"""Rows of numbers as Flower's records, and back: lossless, without pickle, nothing taken over
before it was checked."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord

from allhands.errors import AllhandsError, UserError

# Names of the arrays in which a row travels that is mostly zeros, or has few different numbers in
# each part.
_PLACES, _VALUES = "places", "values"
_CODES, _PALETTE, _COUNTS, _BOUNDS = "codes", "palette", "counts", "bounds"
_MOST_COLOURS = 256  # different numbers of a part, so that one byte says which
_STYPE = "numpy.ndarray"
_DTYPES = {torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2", torch.int64: "<i8"}
Expected = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class BadUpdate(AllhandsError, ValueError):
    """What came from a peer is not what it must be; the message says in what."""


def pack(rows: Mapping[str, torch.Tensor], bounds: Sequence[int] | None = None) -> ArrayRecord:
    """Tensors by name as a record. A row of floating point that has more zeros than other numbers
    travels as the others and their places, if that is shorter.

    Args:
        rows: the tensors.
        bounds: where parts of the rows begin, from 0, and their length at the end; a row that has
            at most 256 different numbers in each part travels as those and a byte (or a bit) for
            each number. None: rows are not looked at for it.

    Raises:
        UserError: a tensor of a type that cannot travel, such as bfloat16.
    """
    record = ArrayRecord()
    for name, tensor in rows.items():
        check_dtype(name, tensor.dtype)
        values = tensor.detach().cpu().contiguous().numpy()
        is_row = tensor.is_floating_point() and tensor.dim() == 1
        places = _others(values) if is_row else None
        coded = (
            _encode(values, bounds) if is_row and places is None and bounds is not None else None
        )
        if places is not None:
            record[f"{name}.{_PLACES}"] = _pack(places)
            record[f"{name}.{_VALUES}"] = _pack(values[places])
        elif coded is not None:
            record.update({f"{name}.{part}": _pack(array) for part, array in coded.items()})
        else:
            record[name] = _pack(values)
    return record


def unpack(record: Mapping[str, Array], expected: Expected) -> dict[str, torch.Tensor]:
    """The tensors of a record, on the processor.

    Args:
        record: from a peer: nothing in it is believed.
        expected: by name the type and the shape that each must have.

    Raises:
        BadUpdate: something is missing, is there beside, or is of another type or shape; says what.
    """
    left, made = dict(record), {}
    for name, (dtype, shape) in expected.items():
        if name in left:
            kind = np.dtype(_DTYPES[dtype])
            made[name] = torch.from_numpy(
                _read(name, left.pop(name), (kind,), shape, math.prod(shape))
            )
            continue
        for parts, read in (
            ((_PLACES, _VALUES), _scatter),
            ((_CODES, _PALETTE, _COUNTS, _BOUNDS), _decode),
        ):
            if (
                all(f"{name}.{part}" in left for part in parts)
                and len(shape) == 1
                and dtype.is_floating_point
            ):
                made[name] = read(
                    name, [left.pop(f"{name}.{part}") for part in parts], dtype, shape[0]
                )
                break
        else:
            raise BadUpdate(f"it has no array '{name}', it has {_names(record)}")
    if left:
        raise BadUpdate(f"it has an array '{_shown(next(iter(left)))}' that was not asked for")
    return made


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise `UserError` unless numbers of this type can travel."""
    if dtype not in _DTYPES:
        raise UserError(
            f"'{name}' is {dtype}, which cannot travel between sites: Flower's arrays are NumPy's, "
            "which have "
            f"{', '.join(str(known) for known in _DTYPES)}; write model.to(torch.float32)"
        )


def _others(values: np.ndarray) -> np.ndarray | None:
    """Where a row is not +0, int32 or int64; None where it is no shorter to say so."""
    # By their bits: -0 equals 0, and shall come out as it went in.
    bits = values.view(f"<u{values.dtype.itemsize}")
    count, width = int(np.count_nonzero(bits)), 4 if len(values) < 2**31 else 8
    if count * 2 >= len(values) or count * (width + values.dtype.itemsize) >= values.nbytes:
        return None
    return np.flatnonzero(bits).astype(f"<i{width}")


def _encode(values: np.ndarray, bounds: Sequence[int]) -> dict[str, np.ndarray] | None:
    """A row as a palette for each part and a code for each number; None where some part has too
    many different numbers."""
    bits = values.view(f"<u{values.dtype.itemsize}")
    codes, palettes = np.empty(len(values), dtype=np.uint8), []
    for begin, end in itertools.pairwise(bounds):
        # Spares sorting what will not do.
        if len(np.unique(bits[begin : begin + 4 * _MOST_COLOURS])) > _MOST_COLOURS:
            return None
        palette, found = np.unique(bits[begin:end], return_inverse=True)
        if len(palette) > _MOST_COLOURS:
            return None
        codes[begin:end] = found
        palettes.append(palette)
    counts = np.array([len(palette) for palette in palettes], dtype=np.int64)
    if counts.max(initial=0) <= 2:
        codes = np.packbits(codes)
    return {
        _CODES: codes,
        _PALETTE: np.concatenate(palettes).view(values.dtype),
        _COUNTS: counts,
        _BOUNDS: np.array(bounds, dtype=np.int64),
    }


def _pack(values: np.ndarray) -> Array:
    return Array(values.astype(values.dtype.newbyteorder("<"), copy=False))


def _read(
    name: str, array: Array, kinds: tuple[np.dtype, ...], shape: tuple[int, ...] | None, most: int
) -> np.ndarray:
    """An array whose header and length agree with what is expected (`shape`, or one row of at most
    `most` numbers); memory is taken only then."""
    if not isinstance(array, Array) or array.stype != _STYPE:
        raise BadUpdate(f"the array '{name}' is not one of NumPy's")
    stream = io.BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(stream)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        there, fortran, kind = read(stream)
    except (ValueError, KeyError, OSError, EOFError, SyntaxError, RecursionError, MemoryError):
        raise BadUpdate(
            f"the array '{name}' cannot be read: {len(array.data)} bytes that are none of NumPy's "
            "files"
        ) from None
    if kind not in kinds:
        raise BadUpdate(f"'{name}' is {kind}, and must be {kinds[0]}")
    if (shape is not None and there != shape) or (
        shape is None and (len(there) != 1 or there[0] > most)
    ):
        wanted = list(shape) if shape is not None else f"one row of at most {most} numbers"
        raise BadUpdate(f"'{name}' is {list(there)}, and must be {wanted}")
    if len(array.data) - stream.tell() != math.prod(there) * kind.itemsize or (
        fortran and len(there) > 1
    ):
        raise BadUpdate(
            f"the array '{name}' is cut off, or too long: {len(array.data)} bytes for "
            f"{list(there)} {kind}"
        )
    values = np.frombuffer(array.data, dtype=kind, offset=stream.tell()).reshape(there)
    # A copy: what is read from bytes cannot be written to.
    return values.astype(kind.newbyteorder("="))


def _scatter(name: str, arrays: Sequence[Array], dtype: torch.dtype, length: int) -> torch.Tensor:
    places, values = arrays
    at = _read(f"{name}.{_PLACES}", places, (np.dtype("<i4"), np.dtype("<i8")), None, length)
    those = _read(f"{name}.{_VALUES}", values, (np.dtype(_DTYPES[dtype]),), at.shape, length)
    if len(at) and (at[0] < 0 or at[-1] >= length or not (np.diff(at) > 0).all()):
        raise BadUpdate(f"the places of '{name}' do not rise from 0 to below {length}")
    row = torch.zeros(length, dtype=dtype)
    row[torch.from_numpy(at.astype(np.int64))] = torch.from_numpy(those)
    return row


def _decode(name: str, arrays: Sequence[Array], dtype: torch.dtype, length: int) -> torch.Tensor:
    """A row from palettes and codes."""
    codes, palette, counts, bounds = arrays
    whole = np.dtype("<i8")
    edges = _read(f"{name}.{_BOUNDS}", bounds, (whole,), None, length + 1)
    many = _read(f"{name}.{_COUNTS}", counts, (whole,), (max(len(edges) - 1, 0),), length)
    good = (
        len(edges) > 1
        and edges[0] == 0
        and edges[-1] == length
        and bool((np.diff(edges) > 0).all())
    )
    if not good or many.min() < 1 or many.max() > _MOST_COLOURS:
        raise BadUpdate(f"the parts of '{name}' do not make up {length} numbers")
    colours = _read(
        f"{name}.{_PALETTE}",
        palette,
        (np.dtype(_DTYPES[dtype]),),
        (int(many.sum()),),
        length * _MOST_COLOURS,
    )
    packed = many.max() <= 2
    given = _read(
        f"{name}.{_CODES}",
        codes,
        (np.dtype(np.uint8),),
        (-(-length // 8) if packed else length,),
        length,
    )
    if packed:
        given = np.unpackbits(given, count=length)
    sizes = np.diff(edges)
    if (given >= np.repeat(many, sizes)).any():
        raise BadUpdate(f"a code of '{name}' is none of its palette's")
    return torch.from_numpy(colours[np.repeat(np.cumsum(many) - many, sizes) + given])


def _names(record: Mapping[str, Array]) -> str:
    return ", ".join(f"'{_shown(name)}'" for name in list(record)[:5]) or "none"


def _shown(name: object) -> str:
    """A peer's text, short and printable."""
    return "".join(c if c.isprintable() else "?" for c in str(name)[:60])
