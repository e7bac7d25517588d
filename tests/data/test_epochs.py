"""`set_epoch` of whatever the user passes is called with each epoch, or refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    default_collate,
)

from allhands import Federated, SupervisedRunner, UserError


class Told:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Rows(Told, Dataset[Any]):
    """Its samples are the epoch."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((1,), float(self.epochs[-1])), torch.zeros(1)


class Stream(Told, IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(1), torch.zeros(1))] * 8)


class Plain(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.ones(1), torch.zeros(1)


class Collate(Told):
    def __call__(self, samples: Any, scale: float = 1.0) -> Any:
        return default_collate(samples)

    def method(self, samples: Any) -> Any:
        return default_collate(samples)


class Sampler(Told, SequentialSampler):
    def __init__(self, data: Any) -> None:
        SequentialSampler.__init__(self, data)
        Told.__init__(self)


class Batches(BatchSampler):
    """Of another class, so that it is kept as it is."""


def train(loader: Any, **options: Any) -> Any:
    model = nn.Linear(1, 1)
    return SupervisedRunner(device="cpu").train(
        model=model,
        criterion=lambda output, _: output.mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": loader},
        **{"num_epochs": 3} | options,
    )


@pytest.mark.parametrize(
    "around", [lambda d: d, lambda d: Subset(d, range(6)), lambda d: ConcatDataset([d, Plain()])]
)
def test_a_data_set_and_those_inside_another(around):
    told = Rows()
    train(DataLoader(around(told), 4))
    assert told.epochs == [0, 1, 2]


@pytest.mark.parametrize("make", [lambda c: c, lambda c: partial(c, scale=2.0), lambda c: c.method])
@pytest.mark.parametrize("data", [Plain(), Stream()], ids=["read", "stream"])
def test_a_collate_function(make, data):
    told = Collate()
    train(DataLoader(data, 4, collate_fn=make(told)))
    assert told.epochs == [0, 1, 2]
    if isinstance(data, Stream):
        assert data.epochs[-3:] == [0, 1, 2]


def test_a_sampler_and_the_one_inside_a_batch_sampler():
    data = Plain()
    for make in (
        lambda s: {"sampler": s, "batch_size": 4},
        lambda s: {"batch_sampler": Batches(s, 4, False)},
    ):
        told = Sampler(data)
        train(DataLoader(data, **make(told)))
        assert told.epochs == [0, 1, 2]


def test_the_samples_of_loader_processes_know_their_epoch():
    told, seen = Rows(), []
    model = nn.Linear(1, 1)

    def criterion(output: Any, target: Any) -> Any:
        return output.mean() + target.mean()

    class Keeps(SupervisedRunner):
        def handle_batch(self, model, batch):
            seen.append(float(batch[0][0]))
            return model(batch[0]), batch[1]

    Keeps(device="cpu").train(
        model=model,
        criterion=criterion,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(told, 8, num_workers=1)},
        num_epochs=3,
    )
    assert seen == [0.0, 1.0, 2.0]


class Loader(DataLoader):  # type: ignore[type-arg]
    def set_epoch(self, epoch: int) -> None:
        """Never called."""


def test_where_it_would_not_arrive_it_is_refused():
    with pytest.raises(
        UserError, match=r"persistent_workers=True.*set_epoch of Rows would never reach them"
    ):
        train(DataLoader(Rows(), 4, num_workers=1, persistent_workers=True))
    with pytest.raises(
        UserError, match=r"is a Loader with its own set_epoch, which would never be called"
    ):
        train(Loader(Plain(), 4))
    rounds = Federated(clients=1, partition=[list(range(8))], rounds=1)
    with pytest.raises(UserError, match="set_epoch of Rows is never called in federated training"):
        train(DataLoader(Rows(), 4), distributed=rounds, workers=1, num_epochs=1)
