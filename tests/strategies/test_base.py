"""What all strategies have in common once they are bound."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from allhands import (
    DDP,
    FSDP,
    Federated,
    KVStore,
    LocalSGD,
    Mesh,
    Pipeline,
    Single,
    Strategy,
    Tensor,
    World,
)
from allhands.strategies.model_state import ModelState
from tests.runner.problems import classifier

ALONE = World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "alone")
ALL = (Single, DDP, KVStore, LocalSGD, FSDP, Tensor, Pipeline, Mesh, Federated)


def kinds_of(base: type) -> list[type]:
    """A class and all that derive from it."""
    return [base, *(kind for child in base.__subclasses__() for kind in kinds_of(child))]


def bound(strategy: Strategy) -> Any:
    model = classifier()
    return strategy.bind(model, torch.optim.SGD(model.parameters(), lr=0.1), ALONE)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_a_strategy_stays_as_it_is_when_it_is_bound(kind: type[Strategy]) -> None:
    strategy = kind()
    before = dict(vars(strategy))
    first, second = bound(strategy), bound(strategy)
    after = vars(strategy)
    assert after.keys() == before.keys()
    assert all(after[key] is value for key, value in before.items())
    assert first.exchange is not second.exchange
    assert first.state.model is not second.state.model


def test_each_part_is_small() -> None:
    for strategy in ALL:
        made = bound(strategy())
        for part in (made.placement, made.exchange, made.state):
            for kind in kinds_of(type(part)):
                methods = inspect.getmembers(kind, inspect.isfunction)
                public = [name for name, _ in methods if not name.startswith("_")]
                assert len(public) <= 15, (kind, public)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_a_state_goes_out_of_the_parts_and_back(kind: type[Strategy]) -> None:
    made = bound(kind())
    state: ModelState = made.state
    start = {name: value.clone() for name, value in state.whole_parameters().items()}
    kept = state.copy_weights()
    with torch.no_grad():
        for parameter in made.placement.model.parameters():
            parameter.add_(1)
    assert not any(torch.equal(v, start[n]) for n, v in state.whole_parameters().items())
    state.restore_weights(kept)
    assert all(torch.equal(v, start[n]) for n, v in state.whole_parameters().items())
    assert list(state.model_state()) == list(classifier().state_dict())
    assert list(start) == [name for name, _ in classifier().named_parameters()]


def test_gradients_are_copies_and_zeros_where_there_are_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    state = ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1), ALONE)
    model[0].weight.grad = torch.ones(2, 2)
    found = state.whole_gradients()
    model[0].weight.grad.zero_()
    assert found["0.weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert found["1.bias"].tolist() == [0.0]


def test_buffers_are_this_ranks_own_again() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    own = model[0].running_mean

    class Changes(ModelState):
        def sync_buffers(self) -> None:
            own.fill_(7.0)

    state = Changes(model, torch.optim.SGD(model.parameters(), lr=0.1), ALONE)
    with state.buffers_made_equal() as buffers:
        assert own.tolist() == [7.0, 7.0]
        assert buffers["0.running_mean"].tolist() == [0.0, 0.0]
    assert own.tolist() == [0.0, 0.0]
