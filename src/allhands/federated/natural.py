"""Data sets whose clients are real: digits by writer, plays by speaker, patients by hospital.

Nothing is downloaded: the files are looked for in the folder that the variable ALLHANDS_DATA (or
`root=`) names. They are NumPy files without pickles; each function says which arrays it reads, so
that a file from elsewhere can be brought into that shape.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from allhands.data.catalogue.entry import ROOT_VARIABLE, data_root
from allhands.errors import UserError
from allhands.federated.clients import Clients
from allhands.federated.partitions import natural

Natural = tuple[TensorDataset, Clients]
_MNIST_MEAN, _MNIST_STD = 0.13066048, 0.30810781


def mnist_by_writer(split: str = "train", root: str | os.PathLike[str] | None = None) -> Natural:
    """MNIST with one client a writer: 539 in the training part, with 19 to 131 digits each, 297
    others in the test part.

    Args:
        split: "train" or "test".
        root: folder of ``mnist_train.npz`` and ``mnist_test.npz``, with `x` (uint8 N x 28 x 28),
            `y` and `writer`.

    Returns:
        Images N x 1 x 28 x 28 (float32, normalised) with labels, and the writers.
    """
    _one_of(split, ("train", "test"))
    arrays = _arrays(f"mnist_{split}.npz", ("x", "y", "writer"), root)
    images = (
        torch.from_numpy(arrays["x"])
        .float()
        .div_(255)
        .sub_(_MNIST_MEAN)
        .div_(_MNIST_STD)
        .unsqueeze(1)
    )
    return TensorDataset(images, torch.from_numpy(arrays["y"].astype(np.int64))), natural(
        arrays["writer"]
    )


def shakespeare_by_speaker(block: int = 80, root: str | os.PathLike[str] | None = None) -> Natural:
    """Tiny Shakespeare with one client a speaker, for a model that predicts the next character; the
    last characters of a speaker that do not fill a block are left out, and so is a speaker with
    fewer than ``block + 1``.

    Args:
        block: characters of a sample.
        root: folder of ``shakespeare_speakers.npz``, with `tokens` (uint8), `start` (where each
            speaker begins) and `names`.

    Returns:
        Inputs and targets, int64, N x block each, the second one character further on; and the
        speakers.
    """
    arrays = _arrays("shakespeare_speakers.npz", ("tokens", "start", "names"), root)
    text, pieces, sizes, names = torch.from_numpy(arrays["tokens"].astype(np.int64)), [], [], []
    for begin, end, name in zip(
        arrays["start"], arrays["start"][1:], arrays["names"], strict=False
    ):
        count = (int(end) - int(begin) - 1) // block
        if count < 1:
            continue
        places = int(begin) + torch.arange(count)[:, None] * block + torch.arange(block + 1)
        pieces.append(text[places])
        sizes.append(count)
        names.append(str(name))
    if not sizes:
        raise UserError(f"block={block}; no speaker has so many characters")
    samples = torch.cat(pieces)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    data = TensorDataset(samples[:, :-1].clone(), samples[:, 1:].clone())
    return data, Clients.from_arrays(np.arange(len(samples)), offsets, names)


def heart_disease_by_hospital(root: str | os.PathLike[str] | None = None) -> Natural:
    """Heart disease in four hospitals: 920 patients, 13 columns, whether a vessel is narrowed.

    A missing value becomes the mean of its column over all that are known, and every column is
    brought to mean 0 and deviation 1 over all hospitals. Sites that may not share even that would
    each use their own; for a comparison of algorithms this is what the literature does.

    Args:
        root: folder of ``heart_disease_sites.npz``, with `x` (float32 N x 13, NaN: missing), `num`
            (0 to 4), `site`, `sites`.

    Returns:
        Columns N x 13 (float32) and the label as int64 (1: disease), and the hospitals by name.
    """
    arrays = _arrays("heart_disease_sites.npz", ("x", "num", "site", "sites"), root)
    x = arrays["x"].astype(np.float64)
    x = np.where(np.isnan(x), np.nanmean(x, axis=0), x)
    x = (x - x.mean(0)) / x.std(0)
    labels = torch.from_numpy((arrays["num"] > 0).astype(np.int64))
    return TensorDataset(torch.from_numpy(x.astype(np.float32)), labels), natural(
        arrays["sites"][arrays["site"]]
    )


def _arrays(
    name: str, keys: tuple[str, ...], root: str | os.PathLike[str] | None
) -> dict[str, np.ndarray]:
    folder = data_root(root)
    path = None if folder is None else Path(folder, name)
    if path is None or not path.is_file():
        if path is None:
            where = f"{ROOT_VARIABLE} is not set and root= was not given"
        else:
            where = f"there is no {path}"
        raise UserError(
            f"{where}; put {name} with the arrays {', '.join(keys)} into a folder, and name it by "
            f"{ROOT_VARIABLE}"
        )
    with np.load(path, allow_pickle=False) as arrays:
        for key in keys:
            if key not in arrays:
                raise UserError(f"{path} has no array {key!r}; it has {', '.join(arrays)}")
        return {key: arrays[key] for key in keys}


def _one_of(given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise UserError(f"split={given!r}; write {' or '.join(map(repr, known))}")
