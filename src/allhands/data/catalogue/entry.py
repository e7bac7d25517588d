"""What the catalogue knows of a data set, and where its files are looked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from allhands.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch.utils.data import TensorDataset

ROOT_VARIABLE = "ALLHANDS_DATA"


@dataclass(frozen=True)
class LoadOptions:
    """What `load` was asked for, checked and completed. `limit` is a number of samples, `block` of
    characters."""

    split: str
    root: Path | None
    dtype: str = "float32"
    normalize: bool = True
    limit: int | None = None
    labels: str = "fine"
    block: int = 128


@dataclass(frozen=True)
class Entry:
    """A data set of the catalogue.

    `input_shape` is one sample's, without the batch. `sizes` are the samples of each split. `mean`
    and `std`, a number a channel, are what `normalize=True` subtracts and divides by, on pixels
    scaled to 0..1. `source` says where the publisher offers it, `options` which keywords of `load`
    it takes besides split, root and limit.
    """

    name: str
    num_classes: int
    input_shape: tuple[int, ...]
    sizes: dict[str, int]
    source: str
    reader: Callable[[LoadOptions, Entry], TensorDataset] = field(repr=False)
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    classes: tuple[str, ...] = ()
    options: tuple[str, ...] = ("dtype", "normalize")

    @property
    def splits(self) -> tuple[str, ...]:
        """The names that `load(split=…)` takes. "valid" and "test" are the same samples: no
        publisher here offers three parts."""
        return ("train", "valid", "test")


def data_root(root: str | os.PathLike[str] | None) -> Path | None:
    """The folder under which data sets are: `root`, else ALLHANDS_DATA; None when neither is given.

    Raises `UserError` when it is no folder.
    """
    told = root if root is not None else os.environ.get(ROOT_VARIABLE) or None
    if told is None:
        return None
    folder = Path(told).expanduser()
    if not folder.is_dir():
        name = f"root={str(root)!r}" if root is not None else f"{ROOT_VARIABLE}={told}"
        raise UserError(
            f"{name} is not a folder: create it, or name the folder that holds the data sets."
        )
    return folder


def find_folder(
    root: Path | None, layouts: Sequence[str], marks: Sequence[str], entry: Entry
) -> Path:
    """The first of `root / layout` that holds one of the files `marks` (names that tell the data
    set).

    Raises `UserError` that says where it was looked for, where the data set comes from, and what to
    do.
    """
    if root is None:
        looked = f"{ROOT_VARIABLE} is not set and root= was not given"
    else:
        for layout in layouts:
            folder = root / layout
            if any((folder / mark).is_file() for mark in marks):
                return folder
        looked = (
            f"looked in {', '.join(str(root / layout) for layout in layouts)} for "
            f"{' or '.join(marks)}"
        )
    raise UserError(
        f"the data set {entry.name!r} was not found: {looked}. It is offered by {entry.source}. "
        f"Unpack it, and set {ROOT_VARIABLE} (or root=) to the folder that holds it as "
        f"{layouts[0]}{'/' if layouts[0] else ''}{marks[0]}. The data set 'digits' needs no "
        "download."
    )


def need_file(folder: Path, names: Sequence[str], entry: Entry) -> Path:
    """The first of `names` in `folder`; `UserError` names the file that is absent."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(
        f"{folder} holds a part of the data set {entry.name!r}, but {' or '.join(names)} is "
        f"missing there. Get it from {entry.source}."
    )


def check_size(path: Path, expected: int, what: str) -> None:
    """`UserError` unless the file has exactly `expected` bytes."""
    size = path.stat().st_size
    if size != expected:
        state = "cut off" if size < expected else "too long, or not this file"
        raise UserError(
            f"{path} has {size:,} bytes, but {what} has {expected:,}: it is {state}. Get it again "
            "from its publisher."
        )


def image_dataset(
    images: np.ndarray, labels: np.ndarray, options: LoadOptions, entry: Entry, scale: float = 255.0
) -> TensorDataset:
    """Images (uint8, N x C x H x W, 0..`scale`) and labels (N) as a data set of the dtype that was
    asked for, labels int64."""
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    targets = torch.from_numpy(labels.astype(np.int64))
    pixels = torch.from_numpy(np.require(images, requirements=["C", "W"]))
    if options.dtype == "float32":
        # In place after one conversion: the peak is the bytes plus the floats, not two sets of
        # floats.
        pixels = pixels.to(torch.float32).div_(scale)
        if options.normalize:
            shape = (1, -1, 1, 1)
            pixels.sub_(torch.tensor(entry.mean).view(shape)).div_(
                torch.tensor(entry.std).view(shape)
            )
    return TensorDataset(pixels, targets)


def check_labels(labels: np.ndarray, count: int, path: Path) -> None:
    """`UserError` names the first record whose label is not below `count`."""
    bad = (labels >= count).nonzero()[0]
    if len(bad):
        raise UserError(
            f"{path}: record {bad[0]} has label {labels[bad[0]]}, but labels go from 0 to "
            f"{count - 1}: this is another file, or it is damaged. Get it again from its publisher."
        )
