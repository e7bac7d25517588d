"""CIFAR-10 and CIFAR-100, in the publisher's binary version or in the python version, which
torchvision unpacks as well."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from allhands.data.catalogue.entry import (
    Entry,
    LoadOptions,
    check_labels,
    check_size,
    find_folder,
    image_dataset,
    need_file,
)
from allhands.data.catalogue.safepickle import load_batch
from allhands.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

_PIXELS = 3 * 32 * 32
_PAGE = "A. Krizhevsky, University of Toronto, at www.cs.toronto.edu/~kriz/cifar.html"


class _Version:
    """One of the two versions of one of the two sets: its folder, its files, and how to read
    `count` records of one."""

    def __init__(
        self, folder: str, train: tuple[str, ...], test: tuple[str, ...], labels: dict[str, int]
    ) -> None:
        self.folder, self.train, self.test = folder, train, test
        # Binary: which byte of a record is the label, by the name of the labels. Python: the key is
        # made of that name.
        self.labels = labels

    @property
    def is_binary(self) -> bool:
        return self.train[0].endswith(".bin")


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_VERSIONS = {
    "cifar10": (
        _Version(
            "cifar-10-batches-bin",
            tuple(f"{b}.bin" for b in _BATCHES),
            ("test_batch.bin",),
            {"": 0},
        ),
        _Version("cifar-10-batches-py", _BATCHES, ("test_batch",), {"": 0}),
    ),
    "cifar100": (
        _Version("cifar-100-binary", ("train.bin",), ("test.bin",), {"coarse": 0, "fine": 1}),
        _Version("cifar-100-python", ("train",), ("test",), {"coarse": 0, "fine": 1}),
    ),
}


def _read(options: LoadOptions, entry: Entry) -> TensorDataset:
    version, folder = _find(options.root, entry)
    train = options.split == "train"
    names = version.train if train else version.test
    rows = entry.sizes[options.split] // len(names)
    kind = options.labels if entry.name == "cifar100" else ""
    classes = 20 if kind == "coarse" else entry.num_classes
    wanted = entry.sizes[options.split] if options.limit is None else options.limit
    paths = [need_file(folder, [name], entry) for name in names]
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for path in paths:
        take = min(rows, wanted - sum(len(part) for part in labels))
        if take <= 0:
            break
        read = _read_binary if version.is_binary else _read_python
        pixels, numbers = read(path, rows, version, kind)
        check_labels(numbers, classes, path)
        images.append(pixels[:take])
        labels.append(numbers[:take])
    pixels = images[0] if len(images) == 1 else np.concatenate(images)
    return image_dataset(pixels.reshape(-1, 3, 32, 32), np.concatenate(labels), options, entry)


def _find(root: Path | None, entry: Entry) -> tuple[_Version, Path]:
    """The version that is there; the binary one when both are, because it needs no unpickling."""
    versions = _VERSIONS[entry.name]
    layouts = [
        f"{base}{version.folder}"
        for version in versions
        for base in ("", f"{entry.name}/", f"{entry.name.upper()}/")
    ]
    marks = [name for version in versions for name in (version.test[0], version.train[0])]
    if root is not None and root.name in {version.folder for version in versions}:
        layouts.append("")  # the root is the data set's own folder
    folder = find_folder(root, layouts, marks, entry)
    version = next(
        v for v in versions if any((folder / name).is_file() for name in (*v.test, *v.train))
    )
    return version, folder


def _read_binary(
    path: Path, rows: int, version: _Version, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """Records of the label bytes and 3072 pixels, planes R, G, B of 32 rows of 32."""
    record = len(version.labels) + _PIXELS
    check_size(path, rows * record, f"this file, with {rows:,} records of {record} bytes,")
    records = np.fromfile(path, np.uint8).reshape(rows, record)
    return records[:, len(version.labels) :], records[:, version.labels[kind]]


def _read_python(
    path: Path, rows: int, version: _Version, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    size = path.stat().st_size
    if size < rows * _PIXELS:
        raise UserError(
            f"{path} has {size:,} bytes, but its {rows:,} images alone take {rows * _PIXELS:,}: it "
            "is cut off. Get it again from its publisher."
        )
    batch = load_batch(path)
    key = f"{kind}_labels" if kind else "labels"
    if key not in batch or "data" not in batch:
        raise UserError(
            f"{path} holds {', '.join(sorted(batch)) or 'nothing'}, but needs 'data' and {key!r}."
        )
    pixels, labels = batch["data"], np.asarray(batch[key])
    if (
        getattr(pixels, "dtype", None) != np.uint8
        or pixels.shape != (rows, _PIXELS)
        or labels.shape != (rows,)
    ):
        shape = getattr(pixels, "shape", type(pixels).__name__)
        raise UserError(
            f"{path} holds data of shape {shape} and {labels.size} labels, but needs bytes of "
            f"shape ({rows}, {_PIXELS}) and {rows} labels."
        )
    return pixels, labels


CIFAR10 = Entry(
    name="cifar10",
    num_classes=10,
    input_shape=(3, 32, 32),
    sizes={"train": 50_000, "valid": 10_000, "test": 10_000},
    source=f"{_PAGE} (CIFAR-10 binary version or python version)",
    reader=_read,
    mean=(0.49139968, 0.48215841, 0.44653091),
    std=(0.24703223, 0.24348513, 0.26158784),
    classes=(
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ),
)
CIFAR100 = Entry(
    name="cifar100",
    num_classes=100,
    input_shape=(3, 32, 32),
    sizes={"train": 50_000, "valid": 10_000, "test": 10_000},
    source=f"{_PAGE} (CIFAR-100 binary version or python version)",
    reader=_read,
    mean=(0.50707516, 0.48654887, 0.44091784),
    std=(0.26733429, 0.25643846, 0.27615047),
    options=("dtype", "normalize", "labels"),
)
