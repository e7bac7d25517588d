from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import allhands
from allhands import UserError
from allhands.data.agree import share_data
from tests.worlds import in_world


def unseeded() -> torch.Tensor:
    world = allhands.current_world()
    assert world is not None
    torch.manual_seed(world.rank)
    shared = share_data("train", TensorDataset(torch.rand(5)), world)
    return shared.tensors[0]


def other_sizes() -> None:
    world = allhands.current_world()
    assert world is not None
    share_data("train", TensorDataset(torch.rand(5 + world.rank)), world)


@pytest.mark.serial
def test_tensors_drawn_without_a_seed_become_rank_0s() -> None:
    first, second = in_world(2, unseeded)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(5))
    assert torch.equal(first, second)


@pytest.mark.serial
def test_other_sizes_are_refused_with_both() -> None:
    with pytest.raises(
        UserError, match=r"rank 0 a TensorDataset of 5 samples.*rank 1 a TensorDataset of 6 samples"
    ):
        in_world(2, other_sizes)
