"""The samples of rows, and how batches are made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset, default_collate

from tests.conformance.table import features, labels, values


def few() -> TensorDataset:
    return TensorDataset(features(3), labels(3))


def double_classes() -> TensorDataset:
    """What BatchNorm makes of rounding is no matter here."""
    return TensorDataset(features().double(), labels())


def images() -> TensorDataset:
    x = torch.randn(22, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x.to(memory_format=torch.channels_last), labels())


def sequences() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(1 + i % 5, 2, generator=generator), labels()[i]) for i in range(22)]


def padded(samples: list[Any]) -> Any:
    lengths = torch.tensor([len(x) for x, _ in samples])
    return (
        pad_sequence([x for x, _ in samples], batch_first=True),
        lengths,
        torch.stack([y for _, y in samples]),
    )


def ignored() -> TensorDataset:
    """Labels of which some do not count, more of them in the first samples."""
    y = labels().clone()
    y[:7:2] = -100
    return TensorDataset(features(), y)


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 7, (22, 6), generator=generator) for _ in range(2))
    for i in range(22):
        y[i, 1 + i * 5 % 6 :] = -100
    return TensorDataset(x, y)


def words() -> TensorDataset:
    return TensorDataset(tokens().tensors[0], labels())


def damaged() -> list[Any]:
    """Samples of which a collate function drops some: all of a rank's in the first batch."""
    return [None if i < 7 or i % 5 == 0 else (features()[i], labels()[i]) for i in range(22)]


def kept(samples: list[Any]) -> Any:
    whole = [sample for sample in samples if sample is not None]
    return default_collate(whole) if whole else None


def doubled(samples: list[Any]) -> Any:
    """Two rows of a sample whose label is 0, as an augmentation in the collate function makes
    them."""
    return default_collate(
        [row for x, y in samples for row in ([(x, y), (-x, y)] if y == 0 else [(x, y)])]
    )


def overflowing() -> TensorDataset:
    """One sample, of the last rank's share, whose gradient is too large for fp16 at the first
    scales."""
    x, y = features(24).clone(), values(24).clone()
    y[11] = 60.0
    return TensorDataset(x, y)
