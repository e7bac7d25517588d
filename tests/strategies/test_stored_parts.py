"""Parts of a store without servers, brought to other workers; with real losses in
tests/launch/test_elastic_kvstore.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import allhands
from allhands.kvstore.params import Slot, state_of
from allhands.strategies.shards import Shards
from allhands.strategies.stored_model import StoredModel
from allhands.strategies.stored_parts import bring_parts, whole_of
from allhands.world import World
from tests.worlds import in_world


def world_here() -> World:
    world = allhands.current_world()
    assert world is not None
    return world


def stored(world: World) -> StoredModel:
    """A model in a store in which two steps were taken."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    strategy = allhands.KVStore(update="store")
    found = StoredModel(strategy, model, optimizer, world, may_lose=True)
    found.open(0)
    for number in (1, 2):
        assert found.store is not None
        grads = {slot.name: torch.full_like(slot.first, number) for slot in found.slots}
        outs = {slot.name: slot.first.detach() for slot in found.slots}
        found.store.update(grads, outs, allhands.kvstore.store.Share(1.0, 1.0))
    return found


def parts_of_each() -> tuple[Any, ...]:
    found = stored(world_here())
    weights = [p.tolist() for p in found.model.parameters()]
    state = found.store.state() if found.store is not None else None
    found.abandon()
    assert state is not None
    return found.parts(), weights, {k: v["exp_avg"].tolist() for k, v in state.tensors.items()}


def test_each_part_is_on_two_workers_to_the_same_bits() -> None:
    found = [parts for parts, _, _ in in_world(3, parts_of_each)]
    assert [sorted(parts) for parts in found] == [
        ["3/0/0", "3/0/2"],
        ["3/0/0", "3/0/1"],
        ["3/0/1", "3/0/2"],
    ]
    for name in found[0]:
        other = next(parts for parts in found[1:] if name in parts)
        for entry, value in found[0][name].items():
            same = torch.equal if isinstance(value, torch.Tensor) else (lambda a, b: a == b)
            assert same(value, other[name][entry]), (name, entry)


def brought(held: list[Shards]) -> tuple[Any, ...] | str:
    """Each rank has held these parts, and has other weights now."""
    world = world_here()
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-world.rank)
    try:
        state = bring_parts(held[world.rank], dict(model.named_parameters()), world)
    except allhands.WorldError as error:
        return str(error)
    averages = {key: own["exp_avg"].tolist() for key, own in state.tensors.items()}
    steps = {own["step"] for own in state.numbers.values()}
    return [p.tolist() for p in model.parameters()], averages, steps


def test_those_that_are_left_put_the_store_together() -> None:
    (first, weights, averages), _, (third, _, _) = in_world(3, parts_of_each)
    for found in in_world(3, brought, [third, first, {}]):
        assert found == (weights, averages, {2.0})


def test_one_that_had_not_come_into_the_store_has_all_of_it() -> None:
    (first, weights, averages), *_ = in_world(3, parts_of_each)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    named = dict(model.named_parameters())
    with torch.no_grad():
        for parameter, values in zip(named.values(), weights, strict=True):
            parameter.copy_(torch.tensor(values))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for name, parameter in named.items():
        average = torch.tensor(averages[name])
        optimizer.state[parameter] = {"exp_avg": average, "step": torch.tensor(2.0)}
    slots = [Slot(name, [parameter]) for name, parameter in named.items()]
    whole = whole_of(named, state_of(optimizer, slots, 2))
    for found in in_world(2, brought, [first, whole]):
        assert found == (weights, averages, {2.0})


def test_the_keys_of_a_part_that_nobody_has_are_named() -> None:
    (first, _, _), *_ = in_world(3, parts_of_each)
    # the middle third: of 66 numbers those from 22 on, of 0.weight and 1.bias
    found = in_world(2, brought, [first, {}])
    assert found[0] == found[1]
    assert "were lost at once, and with them that of '0.weight' and 1 more parameters" in found[0]
