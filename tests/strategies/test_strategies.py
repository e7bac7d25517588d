from __future__ import annotations

import pytest
import torch

from allhands import DDP, DP, FSDP, KVStore, LocalSGD, Pipeline, Single, Tensor, UserError, World
from allhands.strategies import STRATEGIES, strategy_named


def world_of(size: int, device: str = "cpu") -> World:
    return World(0, 0, 0, size, size, torch.device(device), "gloo", "explicit")


def test_names_and_typos() -> None:
    assert {name: type(strategy_named(name)) for name in STRATEGIES} == {
        "single": Single,
        "dp": DP,
        "ddp": DDP,
        "kvstore": KVStore,
        "local_sgd": LocalSGD,
        "fsdp": FSDP,
        "tensor": Tensor,
        "pipeline": Pipeline,
    }
    with pytest.raises(UserError, match=r"no strategy 'dpp'; did you mean 'd"):
        strategy_named("dpp")


def test_single_is_refused_in_a_larger_world() -> None:
    with pytest.raises(UserError, match="world of 2"):
        Single().check(world_of(2))


def test_dp_needs_gpus_and_one_process() -> None:
    with pytest.raises(UserError, match="needs GPUs.*distributed='ddp'"):
        DP().check(world_of(1))
    with pytest.raises(UserError, match="world of 2 processes"):
        DP().check(world_of(2))


@pytest.mark.gpu
def test_dp_names_devices_that_are_absent() -> None:
    with pytest.raises(UserError, match="no CUDA device \\[99\\]"):
        DP(devices=[0, 99]).check(world_of(1, "cuda"))
