"""The data sets that a configuration names, divided as it says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from allhands.data import catalogue, derive_seed
from allhands.data.catalogue.entry import data_root
from allhands.errors import UserError
from allhands.federated.coala.config_sections import CoalaData
from allhands.federated.coala.datasets import FederatedDataset, split
from allhands.federated.partitions import partition_of
from allhands.federated.samples import Samples

_BLOCK = 80  # characters before the one to be foretold, as in LEAF
_NAMES = ("digits", "mnist", "cifar10", "cifar100", "shakespeare")
_ELSEWHERE = {
    "femnist": "; for a natural partition of handwriting write dataset: mnist with split_type: "
    "niid (one client a writer)"
}


def load(data: CoalaData, seed: int) -> tuple[FederatedDataset, FederatedDataset, int]:
    """The data set of the configuration: to train on, to test on, and the number of classes.

    Raises:
        UserError: it is not here, its files are missing, or its split cannot be made.
    """
    if data.dataset not in _NAMES:
        raise UserError(
            f"data.dataset: {data.dataset!r} is not here, which are "
            f"{', '.join(_NAMES)}{_ELSEWHERE.get(data.dataset, '')}; "
            "or call register_dataset(train, test)"
        )
    if data.dataset == "shakespeare":
        train, test = _speakers(data, seed)
        classes = 65
    elif data.split_type == "niid":
        if data.dataset != "mnist":
            raise UserError(
                f"data.split_type: niid needs the owner of each sample, which {data.dataset} does "
                "not tell; write dir or class, or dataset: mnist or shakespeare"
            )
        train, test = _writers(data, seed)
        classes = 10
    else:
        train, test = (
            FederatedDataset(catalogue.load(data.dataset, part, data.root))
            for part in ("train", "test")
        )
        classes = catalogue.info(data.dataset).num_classes
    split(train, data, seed)
    return train, test, classes


def _writers(data: CoalaData, seed: int) -> tuple[FederatedDataset, FederatedDataset]:
    entry, made = catalogue.info("mnist"), []
    for part in ("train", "test"):
        with _arrays(data, f"mnist_{part}.npz", "x, y and writer") as arrays:
            pixels = (
                torch.from_numpy(arrays["x"])[:, None].float() / 255 - entry.mean[0]
            ) / entry.std[0]
            made.append((pixels, torch.from_numpy(arrays["y"].astype(np.int64)), arrays["writer"]))
    (x, y, writers), (test_x, test_y, _) = made
    kept, names = _choose(writers, data, seed)
    train = TensorDataset(x[kept], y[kept])
    return _by_name(train, names), FederatedDataset(TensorDataset(test_x, test_y))


def _speakers(data: CoalaData, seed: int) -> tuple[FederatedDataset, FederatedDataset]:
    """Shakespeare by speaker: 80 characters, and the one that comes next."""
    with _arrays(data, "shakespeare_speakers.npz", "tokens, start and names") as arrays:
        tokens, start, speakers = (
            torch.from_numpy(arrays["tokens"].astype(np.int64)),
            arrays["start"],
            arrays["names"],
        )
    begins, owner, late = [], [], []
    for number, (first, last) in enumerate(itertools.pairwise(start)):
        own = np.arange(first, last - _BLOCK, _BLOCK)
        begins.append(own)
        owner.append(np.full(len(own), number))
        late.append(np.arange(len(own)) >= int(len(own) * data.train_test_split))
    at, who, tests = np.concatenate(begins), np.concatenate(owner), np.concatenate(late)
    if data.user:
        order = np.random.default_rng(derive_seed(seed, "users")).permutation(len(speakers))
        tests = np.isin(who, order[int(len(order) * data.train_test_split) :])

    def taken(places: np.ndarray) -> TensorDataset:
        windows = torch.from_numpy(at[places])[:, None] + torch.arange(_BLOCK + 1)
        return TensorDataset(tokens[windows[:, :-1]], tokens[windows[:, -1]])

    train = np.flatnonzero(~tests)
    if data.split_type == "niid":
        kept, names = _choose(speakers[who[train]], data, seed)
        train = train[kept]
        test = np.flatnonzero(tests & (np.isin(speakers[who], names) | data.user))
        return _by_name(taken(train), names), _by_name(taken(test), speakers[who[test]])
    return FederatedDataset(taken(train)), FederatedDataset(taken(np.flatnonzero(tests)))


def _choose(owners: np.ndarray, data: CoalaData, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole clients with at least `min_size` samples, drawn until `data_amount` of all samples is
    reached: the samples' places, and their owners."""
    _, place, sizes = np.unique(owners, return_inverse=True, return_counts=True)
    order = np.random.default_rng(derive_seed(seed, "clients")).permutation(
        np.flatnonzero(sizes >= data.min_size)
    )
    if not len(order):
        raise UserError(
            f"data.min_size = {data.min_size}: no client has so many samples; the largest has "
            f"{sizes.max()}"
        )
    reached = int(np.searchsorted(np.cumsum(sizes[order]), data.data_amount * len(owners))) + 1
    kept = np.flatnonzero(np.isin(place, order[:reached]))
    return kept, owners[kept]


def _by_name(dataset: TensorDataset, owners: np.ndarray) -> FederatedDataset:
    return FederatedDataset(
        dataset,
        partition_of(
            {"name": "natural", "column": owners}, Samples(dataset, torch.device("cpu")), None, 0
        ),
    )


def _arrays(data: CoalaData, name: str, needed: str) -> Any:
    root = data_root(data.root)
    file = None if root is None else Path(root) / name
    if file is None or not file.is_file():
        if root is None:
            where = "data.root is not set, nor is ALLHANDS_DATA"
        else:
            where = f"{root} has no file {name}"
        raise UserError(
            f"data.dataset: {data.dataset} with split_type: {data.split_type} needs {name}, with "
            f"{needed}, and {where}"
        )
    return np.load(file, allow_pickle=False)
