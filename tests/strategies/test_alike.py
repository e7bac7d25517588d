"""Buffers and hooks that would make ranks differ from one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import allhands
from allhands import UserError
from allhands.strategies.alike import (
    check_buffers_equal,
    check_parameter_hooks,
    make_buffers_equal,
    own_memory,
)
from tests.worlds import in_world


class Buffers(nn.Module):
    """A buffer of each kind; `write` is a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("own", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).T)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def write(self, own: float) -> None:
        world = allhands.current_world()
        assert world is not None
        self.own += own * world.rank
        self.scratch += world.rank
        self.norm.running_mean += world.rank
        self.calls += 1


def compared(own: float, all_take_part: bool) -> str:
    world, model = allhands.current_world(), Buffers()
    assert world is not None
    model.write(own)
    try:
        check_buffers_equal(model, world, all_take_part or world.rank == 0)
    except UserError as error:
        return str(error)
    return ""


def equal() -> list[Any]:
    world, model = allhands.current_world(), Buffers()
    assert world is not None
    model.transposed += 10.0 * world.rank
    model.write(1.0)
    make_buffers_equal(model, world)
    return [model.own.tolist(), model.norm.running_mean.tolist(), model.transposed.tolist()]


def checks() -> dict[str, Any]:
    return {
        "written from own samples": compared(1.0, True),
        "alike": compared(0.0, True),
        "only one took part": compared(1.0, False),
        "equal": equal(),
    }


@pytest.mark.serial
def test_buffers_of_two_ranks() -> None:
    for found in in_world(2, checks):
        assert (
            "writes the buffer 'own' from the samples of its own rank"
            in found["written from own samples"]
        )
        assert "persistent=False" in found["written from own samples"]
        assert not found["alike"]
        assert not found["only one took part"]
        assert found["equal"] == [[0.0, 0.0], [0.5, 0.5], torch.arange(6.0).view(2, 3).T.tolist()]


def test_an_expanded_buffer_gets_memory_of_its_own() -> None:
    model = nn.Module()
    model.register_buffer("rows", torch.arange(3.0).expand(2, 3))
    model.register_buffer("transposed", torch.ones(2, 3).T)
    transposed = model.transposed
    own_memory(model)
    assert model.rows.stride() == (3, 1)
    assert model.rows.tolist() == [[0.0, 1.0, 2.0]] * 2
    assert model.transposed is transposed


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_is_refused(kind: str) -> None:
    model = nn.Linear(2, 2)
    check_parameter_hooks(model, 2)
    getattr(model.bias, kind)(lambda gradient: None)
    for workers, part in ((2, "worker"), (1, "micro-batch")):
        with pytest.raises(
            UserError,
            match=rf"'bias' has a hook on its gradient.*one {part}'s.*register_step_pre_hook",
        ):
            check_parameter_hooks(model, workers)
