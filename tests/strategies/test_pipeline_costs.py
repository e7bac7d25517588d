"""The time that each part of a pipeline takes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from allhands.strategies.pipeline_costs import measured, measured_on
from allhands.strategies.pipeline_parts import chain_of


def test_measured_costs_tell_a_slow_part_and_leave_the_model_alone() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 1500),
        nn.Linear(1500, 1500),
        nn.Linear(1500, 2),
    )
    before = copy.deepcopy(model.state_dict())
    costs, output = measured(model, chain_of(model), torch.randn(64, 8), torch.device("cpu"))
    assert output.shape == (64, 2)
    assert costs.index(max(costs)) == 3
    assert min(costs) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_last_part_has_the_cost_of_the_loss() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    weight = nn.Parameter(torch.eye(1500))

    def try_on(module: nn.Module, pieces: int) -> Callable[[], torch.Tensor]:
        output = module(torch.randn(64, 8))

        def loss() -> torch.Tensor:
            return (output.sum() * weight @ weight).sum()

        return loss

    costs = measured_on(try_on, model, chain_of(model), 1, torch.device("cpu"))
    assert len(costs) == 2
    assert costs[1] > 3 * costs[0]
