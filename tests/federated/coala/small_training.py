"""A small training by COALA's functions, and the same as a loop written by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import allhands
import allhands.federated as coala
from allhands.federated.coala import api


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    api.unregister()
    api._joined = None
    allhands.finalize()


def parts(sizes=(5, 9, 3, 7), features=6, classes=3) -> dict[str, dict[str, Any]]:
    drawn = torch.Generator().manual_seed(1)
    made = {}
    for number, size in enumerate(sizes):
        x = torch.randn(size, features, generator=drawn)
        made[f"site {number}"] = {"x": x, "y": x[:, :classes].argmax(1)}
    return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def conf(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "server": {"rounds": 3, "clients_per_round": 4, "test_every": 3},
        "client": {
            "local_epoch": 1,
            "batch_size": 100,
            "optimizer": {"type": "SGD", "lr": 0.5, "momentum": 0, "weight_decay": 0},
        },
    }
    for key, value in changes.items():
        made[key] = made.get(key, {}) | value if isinstance(value, dict) else value
    return made


def train(
    serving: Any = None, training: Any = None, data: Any = None, model: Any = Net, **changes: Any
) -> api.Result:
    """Run with these classes registered; `changes` are keys of the configuration."""
    prepare(serving, training, data, model)
    coala.init(conf(**changes))
    return coala.run()


def prepare(serving: Any = None, training: Any = None, data: Any = None, model: Any = Net) -> None:
    api.unregister()
    given = coala.FederatedTensorDataset(parts() if data is None else data, simulated=True)
    coala.register_dataset(given, given)
    coala.register_model(model)
    if serving is not None:
        coala.register_server(serving)
    if training is not None:
        coala.register_client(training)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same(one: api.Result, other: api.Result) -> bool:
    return (
        torch.equal(flat(one.model), flat(other.model))
        and one.history["train"] == other.history["train"]
    )


def by_hand(start: nn.Module, rounds: int = 3, weighted: bool = True) -> nn.Module:
    net, data = copy.deepcopy(start).double(), parts()
    for _ in range(rounds):
        states, weights = [], []
        for part in data.values():
            own = copy.deepcopy(net)
            optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
            nn.functional.cross_entropy(own(part["x"].double()), part["y"]).backward()
            optimizer.step()
            states.append(own.state_dict())
            weights.append(len(part["y"]) if weighted else 1)
        net.load_state_dict(
            {
                n: sum(w / sum(weights) * s[n] for w, s in zip(weights, states, strict=True))
                for n in states[0]
            }
        )
    return net
