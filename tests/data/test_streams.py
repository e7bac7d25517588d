"""Streams of Hugging Face's ``datasets``."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from allhands.data.streams import _in_own_order


class Read(torch.utils.data.IterableDataset):
    def __init__(self, dataset) -> None:
        self.dataset = dataset

    def __iter__(self):
        return (int(row["x"]) for row in _in_own_order(self.dataset))


def test_they_shuffle_in_a_loader_process_as_without_one() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
    data = data.shuffle(seed=0, buffer_size=8)
    before = torch.utils.data.get_worker_info
    orders = [list(DataLoader(Read(data), batch_size=None, num_workers=n)) for n in (0, 1)]
    assert orders[0] == orders[1] != list(range(40))
    assert sorted(orders[0]) == list(range(40))
    assert torch.utils.data.get_worker_info is before
