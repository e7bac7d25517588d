"""Gradients of gradients, and sparse ones, with layers in slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner, Tensor
from tests.conformance.criteria import GradientPenalty, penalized
from tests.conformance.table import difference
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded"), pytest.mark.timeout(240)]

SAMPLES, BATCH = 16, 8
PLANS = {"in and out": {"0": "colwise", "2": "rowwise"}, "gathered": {"0": "vocab", "4": "vocab"}}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(7, 6, sparse=True), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def hooked() -> nn.Module:
    """The weight is computed in a hook before the forward pass, as torch.nn.utils.spectral_norm
    does."""
    model = network()

    def compute(layer: Any, inputs: Any) -> None:
        layer.weight = layer.raw * layer.size

    layer: Any = model[4]
    layer.raw, layer.size = (
        nn.Parameter(layer.weight.detach().clone()),
        nn.Parameter(torch.ones(3, 1)),
    )
    del layer._parameters["weight"]
    layer.weight = layer.raw.detach()
    layer.register_forward_pre_hook(compute)
    return model


def real() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    )


def ids() -> TensorDataset:
    return TensorDataset(
        torch.randint(0, 7, (SAMPLES, 2), generator=torch.Generator().manual_seed(1)),
        real().tensors[1],
    )


# name -> (model, data, criterion, runner, plan)
TRAININGS: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    **{
        f"penalty, {name}": (network, real, penalized, GradientPenalty, plan)
        for name, plan in PLANS.items()
    },
    "sparse": (words, ids, nn.MSELoss(), SupervisedRunner, {"2": "colwise", "4": "rowwise"}),
    "hooked": (hooked, real, nn.MSELoss(), SupervisedRunner, PLANS["in and out"]),
}


def trained(name: str) -> Any:
    make, data, criterion, runner, plan = TRAININGS[name]
    model = make()
    runner(device="cpu").train(
        model=model,
        criterion=criterion,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        num_epochs=2,
        loaders={"train": DataLoader(data(), BATCH)},
        distributed=Tensor(plan=plan),
    )
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def by_hand(name: str) -> Any:
    make, data, criterion, runner, _ = TRAININGS[name]
    model = make()
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1), data().tensors
    for _ in range(2):
        for first in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            batch = [x[first : first + BATCH], y[first : first + BATCH]]
            criterion(*runner().handle_batch(model, batch)).backward()
            optimizer.step()
    return model.state_dict()


def all_of_them() -> dict[str, Any]:
    return {name: trained(name) for name in TRAININGS}


def test_they_are_those_of_one_process() -> None:
    for found in in_world(2, all_of_them):
        for name, weights in found.items():
            assert difference(weights, by_hand(name)) < 1e-5, name
