"""MNIST as its four idx files, plain or gzipped: as published, or where torchvision leaves them."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from allhands.data.catalogue.entry import (
    Entry,
    LoadOptions,
    check_labels,
    find_folder,
    image_dataset,
    need_file,
)
from allhands.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

_LAYOUTS = ("MNIST/raw", "mnist/raw", "mnist", "MNIST", "raw", "")


def _names(part: str, what: str) -> list[str]:
    """The names under which a file goes: `train-images-idx3-ubyte`, with a dot instead of the
    second hyphen, with .gz."""
    dimensions = 3 if what == "images" else 1
    plain = [f"{part}-{what}{mark}idx{dimensions}-ubyte" for mark in ("-", ".")]
    return plain + [f"{name}.gz" for name in plain]


def _read(options: LoadOptions, entry: Entry) -> TensorDataset:
    part = "train" if options.split == "train" else "t10k"
    marks = _names("t10k", "images") + _names("train", "images")
    folder = find_folder(options.root, _LAYOUTS, marks, entry)
    count = entry.sizes[options.split]
    images = read_idx(need_file(folder, _names(part, "images"), entry), (count, 28, 28))
    labels_path = need_file(folder, _names(part, "labels"), entry)
    labels = read_idx(labels_path, (count,))
    check_labels(labels, entry.num_classes, labels_path)
    taken = slice(options.limit)
    return image_dataset(images[taken, None], labels[taken], options, entry)


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes of an idx file (plain, or gzipped when its name ends in .gz) of exactly this shape,
    as uint8.

    Raises `UserError` that names the file, its size and the expected size.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(
            f"{path} ({path.stat().st_size:,} bytes) cannot be unpacked: {error}. Get it again "
            "from its publisher."
        ) from None
    # Two zero bytes, 8 for unsigned bytes, the number of dimensions; then each dimension, big end
    # first.
    header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    expected = len(header) + int(np.prod(shape))
    packed = " unpacked" if path.suffix == ".gz" else ""
    if data[:4] != header[:4]:
        raise UserError(
            f"{path} begins with {data[:4].hex(' ') or 'nothing'}, but an idx file of "
            f"{len(shape)}-dimensional bytes begins with {header[:4].hex(' ')} ({len(data):,} "
            f"bytes{packed}, expected {expected:,}). Get it again from its publisher."
        )
    if data[: len(header)] != header:
        told = struct.unpack_from(f">{min(len(shape), (len(data) - 4) // 4)}I", data, 4)
        here, there = " x ".join(map(str, told)), " x ".join(map(str, shape))
        raise UserError(
            f"{path} says that it holds {here} bytes, but MNIST has {there} there: it is another "
            "data set's."
        )
    if len(data) != expected:
        state = "cut off" if len(data) < expected else "too long"
        raise UserError(
            f"{path} has {len(data):,} bytes{packed}, but {' x '.join(map(str, shape))} bytes and "
            f"their header take {expected:,}: it is {state}. Get it again from its publisher."
        )
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)


MNIST = Entry(
    name="mnist",
    num_classes=10,
    input_shape=(1, 28, 28),
    sizes={"train": 60_000, "valid": 10_000, "test": 10_000},
    source="Y. LeCun, C. Cortes and C. Burges, THE MNIST DATABASE of handwritten digits, at "
    "yann.lecun.com/exdb/mnist",
    reader=_read,
    mean=(0.13066048,),
    std=(0.30810781,),
    classes=tuple("0123456789"),
)
