"""The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn: real images without a
download."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from allhands.data.catalogue.entry import Entry, LoadOptions, image_dataset
from allhands.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

_LARGEST = 16  # a pixel counts the dark points of a 4 x 4 square


def _read(options: LoadOptions, entry: Entry) -> TensorDataset:
    images, labels = _load_digits()
    # Sorted by class (keeping the order within one), every fifth sample is held out: a fixed split,
    # each class in proportion.
    held_out = np.zeros(len(labels), bool)
    held_out[np.argsort(labels, kind="stable")[::5]] = True
    rows = np.flatnonzero(~held_out if options.split == "train" else held_out)[: options.limit]
    return image_dataset(images[rows, None], labels[rows], options, entry, scale=_LARGEST)


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images (uint8, N x 8 x 8, 0..16) and labels (N).

    The table is read straight from scikit-learn's folder where it is where it has always been:
    importing scikit-learn takes a second or more in every worker, reading the table a few
    hundredths.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the data set 'digits' comes with scikit-learn, which is not installed: pip install "
            '"allhands[data]".'
        )
    table = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if table.is_file():
        values = np.loadtxt(table, delimiter=",", dtype=np.uint8)
        return values[:, :-1].reshape(-1, 8, 8), values[:, -1]
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images.astype(np.uint8), bunch.target.astype(np.uint8)


DIGITS = Entry(
    name="digits",
    num_classes=10,
    input_shape=(1, 8, 8),
    sizes={"train": 1437, "valid": 360, "test": 360},
    source="scikit-learn (a copy of the test set of E. Alpaydin and C. Kaynak's optical digits, "
    "UCI repository)",
    reader=_read,
    classes=tuple("0123456789"),
)
