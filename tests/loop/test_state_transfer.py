"""What members of a changed world bring over to one another; with real losses in
tests/launch/test_elastic.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import allhands
from allhands.errors import UserError
from allhands.loop.state_transfer import broadcast_state
from tests.worlds import in_world


def brought_over() -> Any:
    world = allhands.current_world()
    assert world is not None
    torch.manual_seed(world.rank)
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (world.rank + 1))
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    own = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.full((100,), world.rank, dtype=torch.bfloat16),
        "position": {"samples": 12, "done": {"train": {"loss": 0.5}}, "rates": [0.1]},
        "nothing": None,
    }
    found = broadcast_state(own if world.rank == 2 else None, 2, world)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    averages = [state["exp_avg"].tolist() for state in optimizer.state.values()]
    rest = found["position"], found["nothing"], found["half"].tolist()
    return model.weight.tolist(), averages, optimizer.param_groups[0]["lr"], rest


def test_all_ranks_get_the_state_of_one():
    first, second, source = in_world(3, brought_over)
    assert first == second == source
    assert source[2] == pytest.approx(0.3)


def refused() -> str:
    world = allhands.current_world()
    assert world is not None
    try:
        broadcast_state({"callback": object()}, 0, world)
    except UserError as error:
        return str(error)
    return ""


def test_an_object_that_is_no_plain_data_is_refused():
    (said,) = in_world(1, refused)
    assert "callback is a builtins.object, which a checkpoint cannot store safely" in said
