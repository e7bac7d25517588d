"""Optimizer steps that are captured in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from allhands import UserError
from tests.step.captured_steps import (
    MOMENTUM,
    OPTIMIZERS,
    Trained,
    apart,
    data,
    network,
    without_dropout,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("sizes", [(8,), (8, 5)], ids=str)
def test_weights_after_fifty_steps_equal_eager_ones(
    kind: Any, options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    device = torch.device("cuda", 0)
    made = []
    for captured in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = False
        one = Trained(network(), kind, options, device, captured=captured)
        torch.cuda.manual_seed(5)  # dropout draws the same in a replay
        one.steps(data(50, sizes))
        one.optimizer.param_groups[0]["lr"] *= 0.5
        one.steps(data(1, (3,)) + data(20, sizes, seed=2))
        made.append(one)
    assert made[0].said == ["step: captured in a CUDA graph, and replayed from here on"]
    assert apart(made[0].model, made[1].model) < 2e-5
    assert made[0].losses == pytest.approx(made[1].losses, rel=1e-4)


def test_gradients_are_those_of_the_last_step() -> None:
    device = torch.device("cuda", 0)
    trained, plain = (
        Trained(without_dropout(), torch.optim.SGD, MOMENTUM, device, captured=r)
        for r in (True, False)
    )
    for batches in (data(6), data(1, (3,), seed=1), data(1, seed=2)):
        for one in (trained, plain):
            one.steps(batches)
    assert len(trained.said) == 1
    for one, other in zip(trained.model.parameters(), plain.model.parameters(), strict=True):
        assert one.grad is not None
        assert (one.grad - other.grad).abs().max() < 1e-5


class Reads(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if y.sum().item() < 1e9 else -y


class Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y[y.sum(1) > -1e9]


@pytest.mark.parametrize("layer", [Reads, Branches])
def test_a_model_that_waits_for_the_device_trains_eagerly_and_names_the_line(layer: Any) -> None:
    device = torch.device("cuda", 0)
    made = []
    for captured in (True, False):
        torch.manual_seed(4)
        one = Trained(
            nn.Sequential(nn.BatchNorm1d(6), layer(6, 3)),
            torch.optim.SGD,
            MOMENTUM,
            device,
            captured=captured,
        )
        one.steps(data(9))
        made.append(one)
    assert "it waits for the device at" in made[0].said[0]
    assert "test_captured_gpu.py" in made[0].said[0]
    assert apart(made[0].model, made[1].model) < 1e-6
    with pytest.raises(UserError, match=r"step='graph'.*test_captured_gpu\.py"):
        Trained(nn.Sequential(layer(6, 3)), torch.optim.SGD, MOMENTUM, device, insist=True).steps(
            data(9)
        )
