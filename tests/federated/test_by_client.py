"""What the history has of each client by its name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import allhands
from allhands import SupervisedRunner
from allhands.federated import Clients, Federated
from allhands.federated.by_client import BY_CLIENT, MOST_BY_NAME, tells
from allhands.loop import workers

NAMES = ["north", "east", "south"]
X = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _world(monkeypatch):
    monkeypatch.setattr(workers, "world_around", lambda: 1)
    yield
    allhands.finalize()


def train(names, data=None, **options):
    count = len(names or NAMES)
    parts = [list(range(client, 30, count)) for client in range(count)]
    net = nn.Linear(4, 2)
    return SupervisedRunner(device="cpu").train(
        model=net,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        datasets={"batch_size": 5, "train": data or TensorDataset(X, (X[:, 0] > 0).long())},
        distributed=Federated(
            partition=Clients(parts, names), rounds=3, evaluate_every=3, **options
        ),
        verbose=False,
    )


class Broken(Dataset):
    """A sample that east has cannot be read."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        if index == 10:
            raise ValueError("planted fault")
        return X[index], int(X[index, 0] > 0)


def test_a_history_calls_clients_by_their_names():
    history = train(NAMES, per_round=2, test_fraction=0.3)
    assert all(set(cohort) < set(NAMES) for cohort in history["cohort"])
    found = history[BY_CLIENT]
    assert list(found) == NAMES
    for name, own in found.items():
        assert own["round"] == [n for n, cohort in enumerate(history["cohort"]) if name in cohort]
        assert own["samples"] == [7.0] * len(own["round"])
        assert own["measured"]["round"] == [2]
        assert set(own["measured"]) == {"round", "loss", "accuracy"}
    mean = sum(own["measured"]["loss"][0] for own in found.values()) / 3
    assert history["clients"]["loss"] == [pytest.approx(mean)]


def test_a_client_that_fails_is_in_the_history_by_its_name():
    history = train(NAMES, Broken(), on_client_failure="skip", executor="serial")
    assert history["failed"] == [["east"]] * 3
    assert history[BY_CLIENT]["east"] == {}
    assert history[BY_CLIENT]["north"]["round"] == [0, 1, 2]


def test_clients_without_names_or_too_many_have_no_rows():
    history = train(None)
    assert BY_CLIENT not in history
    assert history["cohort"] == [[0, 1, 2]] * 3
    many = Clients([[n] for n in range(MOST_BY_NAME + 1)], map(str, range(MOST_BY_NAME + 1)))
    assert not tells(many)
