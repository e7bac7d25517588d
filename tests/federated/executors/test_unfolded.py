"""Convolutions as products of patches: those of PyTorch, one by one and stacked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from allhands.federated.executors.unfolded import UnfoldedConv2d, unfold_convolutions
from tests.federated import simulating as sim
from tests.federated.executors.comparing import CHUNKS, SIZES, difference, images, network


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"dilation": 2, "bias": False},
        {"stride": (1, 3), "padding": (0, 2)},
        {"kernel_size": 1},
        {"kernel_size": 1, "stride": 2},
        {"padding": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("channels", "side"), [(3, 9), (40, 9), (3, 19), (40, 19)]
)  # all forms: few and many, small and large
def test_a_convolution_as_a_product_of_patches(options, channels, side):
    made_of = {"kernel_size": (3, 2), **options}
    clients = [nn.Conv2d(channels, 5, **made_of).double() for _ in range(3)]
    x = torch.randn(3, 4, channels, side, side - 1, dtype=torch.float64, requires_grad=True)
    expected = torch.stack([layer(one) for layer, one in zip(clients, x, strict=True)])
    layer = nn.Conv2d(channels, 5, **made_of).double()
    unfold_convolutions(layer)
    assert type(layer) is UnfoldedConv2d
    weights, _ = torch.func.stack_module_state(clients)
    made = torch.func.vmap(lambda own, one: torch.func.functional_call(layer, own, one))(weights, x)
    assert (made - expected).abs().max() < 1e-12
    probe = torch.randn_like(made)
    ours = torch.autograd.grad((made * probe).sum(), [x, *weights.values()])
    theirs = torch.autograd.grad(
        (expected * probe).sum(), [x, *(p for layer in clients for p in layer.parameters())]
    )
    assert (ours[0] - theirs[0]).abs().max() < 1e-11
    for number, name in enumerate(weights):
        for client in range(3):
            own = theirs[1 + client * len(weights) + number]
            assert (ours[1 + number][client] - own).abs().max() < 1e-11, name


def test_stacked_with_convolutions_as_products(monkeypatch):
    monkeypatch.setattr("allhands.federated.executors.unfolded.DEVICES", {"cpu"})
    made = sim.rounds(
        executor="stacked",
        net=network(),
        given=images(),
        who=sim.clients(SIZES),
        criterion=nn.CrossEntropyLoss(),
    )
    assert type(made.work.model[0]) is UnfoldedConv2d
    assert difference(["serial", *CHUNKS], norm="group", batch_size=4) < 1e-12
    torch.manual_seed(2)
    deep = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 3)
    ).double()
    assert difference(["serial", *CHUNKS], net=lambda: deep, batch_size=4) < 1e-12
