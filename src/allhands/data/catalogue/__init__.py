"""The catalogue of data sets: known ones by name, in the layouts in which their publishers offer
them.

Nothing is downloaded. `digits` comes with scikit-learn; the others are looked for under the folder
that the variable ALLHANDS_DATA (or `root=`) names.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from allhands.checks import check_choice, check_whole
from allhands.data.catalogue.cifar import CIFAR10, CIFAR100
from allhands.data.catalogue.digits import DIGITS
from allhands.data.catalogue.entry import Entry, LoadOptions, data_root
from allhands.data.catalogue.mnist import MNIST
from allhands.data.catalogue.shakespeare import SHAKESPEARE, VOCABULARY, in_blocks
from allhands.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

_ENTRIES = {entry.name: entry for entry in (DIGITS, MNIST, CIFAR10, CIFAR100, SHAKESPEARE)}

__all__ = ["VOCABULARY", "Entry", "in_blocks", "info", "load", "names"]


def names() -> tuple[str, ...]:
    """The names that `load` takes."""
    return tuple(_ENTRIES)


def info(name: str) -> Entry:
    """What is known of a data set: `num_classes`, `input_shape`, `sizes`, `classes`, `mean`, `std`,
    `source`.

    Raises `UserError` with the nearest name for one that is not in the catalogue.
    """
    if name in _ENTRIES:
        return _ENTRIES[name]
    hint = did_you_mean(name, _ENTRIES)
    raise UserError(
        f"no data set {name!r} in the catalogue, which holds {', '.join(_ENTRIES)}{hint}"
    )


def load(
    name: str,
    split: str = "train",
    root: str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    normalize: bool | None = None,
    limit: int | None = None,
    labels: str | None = None,
    block: int | None = None,
) -> TensorDataset:
    """A data set of the catalogue, wholly in memory.

    Images are N x C x H x W and their labels N (int64); `shakespeare` gives two int64 tensors N x
    `block`, the second one character further on. In float32, CIFAR's training images take 614 MB
    (`dtype="uint8"`: 154 MB), MNIST's 188 MB (47 MB).

    Args:
        name: one of `names()`.
        split: "train", "valid" or "test"; the last two are the same samples, the publisher's test
            set (digits: every fifth sample of each class, 360; shakespeare: the last tenth of the
            text).
        root: where data sets are; None: the folder that ALLHANDS_DATA names.
        dtype: "float32" (pixels scaled to 0..1) or "uint8" (as stored, 0..255; digits 0..16). None:
            float32.
        normalize: subtract the training set's mean and divide by its deviation, a channel at a time
            (`info(name).mean`, `.std`; digits stay in 0..1). None: yes for float32, no for uint8.
        limit: at most this many samples, the first ones.
        labels: cifar100 only: "fine" (100 classes, the default) or "coarse" (20).
        block: shakespeare only: characters in a sample; None: 128.

    Raises:
        UserError: the name, split or an option is wrong or does not belong to this data set; its
            files are missing, cut off or damaged (with the file, its size and the expected size),
            or scikit-learn is missing for digits.
    """
    entry = info(name)
    check_choice("split", split, entry.splits)
    given = {"dtype": dtype, "normalize": normalize, "labels": labels, "block": block}
    asked: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    for key in asked:
        if key not in entry.options:
            raise UserError(
                f"{key}= does not belong to the data set {name!r}, which takes "
                f"{', '.join(entry.options)}; leave it out."
            )
    check_choice("dtype", dtype, ("float32", "uint8"), otherwise="None")
    if dtype == "uint8" and normalize:
        raise UserError(
            "normalize=True needs dtype='float32': bytes cannot hold normalised pixels."
        )
    check_choice("labels", labels, ("fine", "coarse"), otherwise="None")
    for key, value in (("limit", limit), ("block", block)):
        check_whole(key, value, otherwise="None")
    return entry.reader(LoadOptions(split=split, root=data_root(root), limit=limit, **asked), entry)
