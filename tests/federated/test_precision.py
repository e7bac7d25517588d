"""bf16: clients' forward passes are narrowed, and nothing else is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated.algorithms import Scaffold
from tests.federated import simulating as sim
from tests.federated.executors.comparing import SIZES, Pulled, images, network

STACKED = ["stacked", {"name": "stacked", "chunk": 2}]

pytestmark = pytest.mark.usefixtures("world")


def convolutions() -> nn.Module:
    """Layers without bias: their sums are rounded once, in whatever kernel."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3, bias=False)
    )


def update(executor, precision: str = "bf16", net=None, algorithm=None, **options) -> torch.Tensor:
    """What two rounds have changed in the global model."""
    options = {
        "criterion": nn.CrossEntropyLoss(),
        "number": 2,
        "batch_size": 4,
        "epochs": 2,
        **options,
    }
    made = sim.rounds(
        copy.deepcopy(algorithm),
        net=net or convolutions(),
        given=images(torch.float32),
        who=sim.clients(SIZES),
        executor=executor,
        precision=precision,
        **options,
    )
    before = made.server.weights.clone()
    made.run()
    assert made.server.weights.dtype == torch.float32
    assert bool((made.server.weights != made.server.weights.bfloat16().float()).any())
    return made.server.weights - before


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def by_hand(backwards: bool) -> torch.Tensor:
    """What one step of each client has changed, with its samples in their order or in the reverse
    one."""
    (x, y), net, parts = images(torch.float32), convolutions(), sim.clients(SIZES)
    learnt = []
    for client in range(len(parts)):
        own, samples = copy.deepcopy(net), torch.as_tensor(parts.samples(client))
        samples = samples.flip(0) if backwards else samples
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(own(x[samples]), y[samples])
        loss.backward()
        learnt.append(torch.cat([-0.1 * p.grad.flatten() for p in own.parameters()]))
    return sum(size / sum(SIZES) * one for size, one in zip(SIZES, learnt, strict=True))


def test_serial_equals_the_loop_by_hand_under_autocast():
    expected = by_hand(backwards=False)
    # Some processors add bf16 numbers up so that the order of the samples counts.
    noise = apart(by_hand(backwards=True), expected)
    found = update("serial", number=1, batch_size=None, epochs=1)
    assert apart(found[found != 0], expected) < max(1e-5, 2 * noise)
    assert apart(update("serial", "fp32", number=1, batch_size=None, epochs=1), found) > max(
        1e-3, noise
    )


@pytest.mark.parametrize(
    "given",
    [{}, {"batch_size": None}, {"algorithm": Scaffold(option="I")}, {"algorithm": Pulled()}],
    ids=["plain", "full batches", "start gradient", "start loss"],
)
def test_stacked_narrows_what_serial_narrows(given):
    expected = update("serial", **given)
    assert apart(update("serial", "fp32", **given), expected) > 1e-3
    for executor in STACKED:
        assert apart(update(executor, **given), expected) < 1e-5


def test_convolutions_as_products_are_narrowed(monkeypatch):
    expected = update("serial")
    monkeypatch.setattr("allhands.federated.executors.unfolded.DEVICES", {"cpu"})
    assert apart(update("stacked"), expected) < 0.01


class _Wide(nn.Module):
    """A layer for which the model switches autocast off."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float())


def test_a_part_of_a_model_that_is_not_narrowed():
    def net() -> nn.Module:
        return nn.Sequential(
            *(_Wide(layer) if isinstance(layer, nn.Conv2d) else layer for layer in convolutions())
        )

    expected = update("serial", net=net())
    assert apart(update("serial"), expected) > 1e-3
    # One client at once: the rounding of bf16 makes more of the last bit of what is wide before it.
    assert apart(update({"name": "stacked", "chunk": 1}, net=net()), expected) < 1e-6


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_stacked_is_serial_to_rounding_with_normalisation_dropout_and_momentum(norm):
    given = {
        "options": {"lr": 0.1, "momentum": 0.9},
        "clip_norm": 1.0,
        "batch_size": 3,
        "drop_last": True,
    }
    expected = update("serial", net=network(norm, dtype=torch.float32), **given)
    for executor in STACKED:
        assert (
            apart(update(executor, net=network(norm, dtype=torch.float32), **given), expected)
            < 0.02
        )


@pytest.mark.parametrize(
    "criterion",
    [nn.MSELoss(), nn.SmoothL1Loss(reduction="sum"), lambda o, t: (o - t).abs().mean()],
    ids=["mean", "sum", "own"],
)
def test_losses_are_not_narrowed(criterion):
    """Batches of 10 samples and 3: a mean whose count or sum were rounded would show."""
    x, y = sim.data(dtype=torch.float32)
    found = []
    for executor in ("serial", "stacked"):
        net = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 1, bias=False))
        torch.manual_seed(3)
        for parameter in net.parameters():
            nn.init.normal_(parameter)
        made = sim.rounds(
            net=net,
            given=(x, y),
            criterion=criterion,
            executor=executor,
            precision="bf16",
            batch_size=10,
            options={"lr": 0.01},
        )
        before = made.server.weights.clone()
        made.run()
        found.append(made.server.weights - before)
    assert apart(found[1], found[0]) < 1e-3


def test_a_repeated_run_is_the_same_to_the_bit():
    for executor in ("serial", "stacked"):
        assert torch.equal(update(executor), update(executor))


class _Mixes(nn.Module):
    """Multiplies its input, which is narrow, by weights that are not, under an operation that wants
    one format."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x
            if x.dtype == torch.float32
            else x.index_put((torch.arange(len(x)),), self.weight.expand(len(x), 64))
        )


def test_a_model_that_fails_in_bf16_is_refused_by_name():
    *first, last = convolutions()
    with pytest.raises(UserError, match="step in bf16 cannot be batched"):
        update("stacked", net=nn.Sequential(*first, _Mixes(), last))


def test_other_formats_are_refused():
    with pytest.raises(UserError, match="precision='fp16'.*'fp32', 'bf16'"):
        update("serial", "fp16")
