"""Parts of an optimizer's state, brought to other ranks; with real losses in
tests/launch/test_elastic_shards.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import allhands
from allhands.strategies.sharded_state import ShardedState
from allhands.strategies.shards import bring_shards, taken
from tests.worlds import in_world


def stepped(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    model(torch.ones(4, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def entries(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value.tolist() for key, value in optimizer.state[p].items()}
        for group in optimizer.param_groups
        for p in group["params"]
        if p in optimizer.state
    ]


def brought(held_by: list[list[int]]) -> tuple[Any, ...] | str:
    """Rank r has held the parameters ``held_by[r]``, and other weights of all the others."""
    world = allhands.current_world()
    assert world is not None
    model, optimizer = stepped(0)
    expected = [p.tolist() for p in model.parameters()], entries(optimizer)
    named = dict(model.named_parameters())
    mine = {name for number, name in enumerate(named) if number in held_by[world.rank]}
    shards = {name: own for name, own in taken(optimizer, named).items() if name in mine}
    assert not optimizer.state
    with torch.no_grad():
        for name, parameter in named.items():
            if name not in mine:
                parameter.fill_(world.rank)
    state = ShardedState(model, optimizer, world, twice=True)
    updated = {id(p) for p in optimizer.param_groups[0]["params"]}
    numbers = [number for number, p in enumerate(named.values()) if id(p) in updated]
    try:
        bring_shards(shards, model, optimizer, world)
    except allhands.WorldError as error:
        return str(error)
    weights = [p.tolist() for p in model.parameters()]
    own = entries(optimizer)
    again = state.optimizer_state()["state"]
    return (
        weights == expected[0],
        own == [expected[1][number] for number in numbers],
        numbers,
        sorted(again) == list(range(6)),
    )


def test_each_rank_gets_what_it_updates_now() -> None:
    found = in_world(3, brought, [[0, 2, 3, 5], [1, 4, 5], []])
    assert all(one[:2] == (True, True) and one[3] for one in found)
    # Each parameter is on two ranks.
    assert sorted(number for one in found for number in one[2]) == sorted(2 * list(range(6)))


def test_what_nobody_has_is_named_on_all_ranks() -> None:
    found = in_world(2, brought, [[0, 1, 2], [3]])
    assert found[0] == found[1]
    assert "were lost at once, and with them that of '2.bias' and 1 more parameters" in found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_taken_out_of_its_optimizer(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    shards = taken(optimizer, {"bias": model.bias})
    assert list(shards) == ["bias"]
    assert shards["bias"]["weight"].dtype == dtype
    assert torch.equal(shards["bias"]["0/momentum_buffer"], torch.ones(2, dtype=dtype))
