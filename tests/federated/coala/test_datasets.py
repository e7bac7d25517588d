"""Data sets of clients under COALA's names, and the models that fit them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import allhands.federated as coala
from allhands.errors import UserError
from allhands.federated.coala import models
from allhands.federated.coala.config import check
from allhands.federated.coala.datasets import split
from allhands.federated.coala.named_datasets import load

DATA = Path(os.environ.get("ALLHANDS_DATA") or Path(__file__).parents[4] / "shared" / "data")
real = pytest.mark.skipif(
    not (DATA / "mnist_train.npz").is_file(), reason="the real data sets are not here"
)


def loaded(seed: int = 0, **data):
    return load(check({"data": data}).data, seed)


def test_digits_are_dealt_out_as_the_configuration_says():
    for options in (
        {"split_type": "iid"},
        {"split_type": "dir", "alpha": 0.3, "min_size": 20},
        {"split_type": "class", "class_per_client": 2},
        {"weights": [1, 3]},
    ):
        train, test, classes = loaded(dataset="digits", num_of_clients=12, **options)
        assert classes == 10
        assert train.users[:2] == ["f0000000", "f0000001"]
        assert test.users == []
        assert torch.equal(torch.sort(train.clients.indices).values, torch.arange(1437)), (
            "every sample once"
        )
        sizes = train.clients.sizes
        if "weights" in options:
            assert 2.8 < sizes[1] / sizes[0] < 3.2
        if options.get("split_type") == "dir":
            assert sizes.min() >= 20
        if options.get("split_type") == "class":
            y = train.samples.targets()
            assert {len(y[train.clients.samples(client)].unique()) for client in range(12)} == {2}
        again, other = (
            loaded(seed, dataset="digits", num_of_clients=12, **options)[0] for seed in (0, 1)
        )
        assert torch.equal(train.clients.indices, again.clients.indices)
        assert not torch.equal(train.clients.indices, other.clients.indices)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"dataset": "femnist"}, "femnist.*write dataset: mnist with split_type: niid"),
        (
            {"dataset": "domainnet"},
            r"domainnet' is not here, which are digits.*register_dataset\(train, test\)",
        ),
        (
            {"dataset": "digits", "split_type": "niid"},
            "niid needs the owner of each sample, which digits does not tell",
        ),
        ({"dataset": "digits", "num_of_clients": 2000}, "2000 clients"),
        (
            {"dataset": "digits", "split_type": "dir", "num_of_clients": 200},
            "200 clients with at least min_size=10",
        ),
        (
            {"dataset": "mnist", "split_type": "niid", "root": "."},
            "needs mnist_train.npz, with x, y and writer",
        ),
    ],
)
def test_what_is_not_here_is_refused(data, message):
    with pytest.raises(UserError, match=message):
        loaded(**data)


@real
def test_mnist_by_writer_takes_whole_writers():
    train, test, classes = loaded(dataset="mnist", split_type="niid", root=str(DATA))
    writers = np.load(DATA / "mnist_train.npz")["writer"]
    assert classes == 10
    assert 0.05 * 60_000 <= train.size() <= 0.05 * 60_000 + 131
    assert {name: train.size(name) for name in train.users} == {
        name: int((writers == int(name)).sum()) for name in train.users
    }
    assert test.size() == 10_000
    everyone = loaded(dataset="mnist", split_type="niid", root=str(DATA), data_amount=1.0)[0]
    assert (len(everyone.users), everyone.size()) == (539, 60_000)


@real
def test_shakespeare_by_speaker_foretells_the_next_character():
    train, test, classes = loaded(
        dataset="shakespeare", split_type="niid", root=str(DATA), data_amount=1.0
    )
    assert classes == 65
    assert set(test.users) <= set(train.users)
    x, y = train.samples.take(torch.arange(3))
    assert torch.equal(x[1, :1], y[:1]), "a client's windows follow one another"
    assert 0.08 < test.size() / (test.size() + train.size()) < 0.15
    assert models.build("rnn", x[0], classes)(x).shape == (3, 65)
    others = loaded(
        dataset="shakespeare", split_type="niid", root=str(DATA), data_amount=1.0, user=True
    )
    assert not set(others[0].users) & set(others[1].users)


def test_a_loader_gives_every_sample_once_each_time_in_another_order():
    data = coala.FederatedTensorDataset(
        {"x": torch.arange(23.0)[:, None], "y": torch.zeros(23)}, num_of_clients=2
    )
    split(data, check({}).data, 0)
    loader = data.loader(5, data.users[0], seed=3)
    first, second = (torch.cat([x for x, _ in loader])[:, 0] for _ in range(2))
    own = data.indices(data.users[0])
    assert torch.equal(first.sort().values, own.sort().values.float())
    assert torch.equal(second.sort().values, first.sort().values)
    assert not torch.equal(first, second)
    assert len(loader) == 3
    again = data.loader(5, data.users[0], seed=3)
    assert torch.equal(torch.cat([x for x, _ in again])[:, 0], first)
    with pytest.raises(UserError, match="no client 'nobody'"):
        data.loader(5, "nobody")


def test_data_by_client_transforms_and_torch_data_sets():
    parts = {"a": {"x": np.ones((3, 2)), "y": [0, 1, 0]}, "b": {"x": np.zeros((2, 2)), "y": [1, 1]}}
    data = coala.FederatedTensorDataset(parts, transform=lambda x: x + 1, simulated=True)
    assert (data.users, data.size("a"), data.size("b"), data.size()) == (["a", "b"], 3, 2, 5)
    assert next(iter(data.loader(5, "a")))[0].unique().tolist() == [2.0]
    sets = {
        "u": TensorDataset(torch.zeros(4, 2), torch.zeros(4)),
        "v": TensorDataset(torch.ones(1, 2), torch.ones(1)),
    }
    torch_data = coala.FederatedTorchDataset(sets, ["v", "u"])
    assert (torch_data.users, torch_data.size("u")) == (["v", "u"], 4)
    for given, message in (
        ({"x": [1]}, "data must be"),
        ({"x": [1], "y": [1, 2]}, "1 inputs and 2 targets"),
    ):
        with pytest.raises(UserError, match=message):
            coala.FederatedTensorDataset(given)
    with pytest.raises(UserError, match="data has no client 'w'"):
        coala.FederatedTorchDataset(sets, ["w"])


def test_models_fit_the_data_or_are_refused():
    for name, shape in (
        ("lenet", (1, 28, 28)),
        ("simple_cnn", (1, 8, 8)),
        ("vgg9", (3, 32, 32)),
        ("resnet18", (3, 32, 32)),
        ("mlp", (7,)),
    ):
        x = torch.randn(2, *shape)
        assert models.build(name, x[0], 4)(x).shape == (2, 4)
    for name, sample, message in (
        (
            "resnet50",
            torch.zeros(3, 32, 32),
            "'resnet50' is a model of COALA that is not here.*did you mean 'resnet18'",
        ),
        ("rnn", torch.zeros(3, 32, 32), "rnn reads characters"),
        ("lenet", torch.zeros(80, dtype=torch.int64), "write model: rnn"),
        ("lenet", torch.zeros(7), "takes square images"),
    ):
        with pytest.raises(UserError, match=message):
            models.build(name, sample, 4)
