"""Every kind of mesh on eight workers, against the hand-written single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import FSDP, Mesh, SupervisedRunner
from allhands.models import GPT, MLP
from allhands.strategies import Strategy
from allhands.strategies.degrees import Degrees
from tests.reference import global_batches, relative_difference, train_by_hand
from tests.worlds import in_world

SAMPLES, BATCH = (
    53,
    16,
)  # the last batch of an epoch has 5 samples, which leaves some of eight ranks without one


class Tokens(nn.Module):
    """The sum of the tokens' losses over a constant; some targets count for nothing."""

    reduction = "sum"

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (
            nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
            / 50
        )


def gpt() -> nn.Module:
    torch.manual_seed(3)
    model = GPT(vocab_size=20, block_size=4, layers=2, heads=2, width=8)
    with torch.no_grad():
        # Biases that stay near 0 would be compared relative to rounding.
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return MLP(6, (16, 24, 16), 8)


def problem(name: str) -> tuple[nn.Module, Any, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if name == "gpt":
        x = torch.randint(0, 20, (SAMPLES, 4), generator=generator)
        y = x.roll(-1, 1)
        y[torch.rand(y.shape, generator=generator) < 0.3] = -100
        return gpt(), Tokens(), (x, y)
    x, y = (
        torch.randn(SAMPLES, 6, generator=generator),
        torch.randint(0, 8, (SAMPLES,), generator=generator),
    )
    y[torch.rand(SAMPLES, generator=generator) < 0.3] = -100
    y[48:50] = -100  # all that some ranks have in the last batch
    return mlp(), nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 8)), (x, y)


# name -> (model, strategy)
CASES: dict[str, tuple[str, Strategy]] = {
    "pp 2, shards 2, tp 2": ("gpt", Mesh(pp=2, dp=2, tp=2, fsdp=FSDP())),
    "pp 2, copies 2, shards 2": ("mlp", Mesh(pp=2, dp={"replicate": 2, "shard": 2})),
    "copies 2, shards 2, tp 2": ("mlp", Mesh(dp={"replicate": 2, "shard": 2}, tp=2)),
    "pp 2, copies 2, tp 2": ("mlp", Mesh(pp=2, dp=2, tp=2)),
    "copies 4, tp 2": ("mlp", Mesh(dp=4, tp=2)),
    "pp 4, shards 2": ("mlp", Mesh(pp=4, dp={"shard": 2})),
    "shards 8": ("mlp", FSDP()),
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]]:
    found = {}
    for case, (name, strategy) in CASES.items():
        model, criterion, tensors = problem(name)
        optimizer = optimizer_of(model)
        data = TensorDataset(*tensors)
        loaders = {
            "train": DataLoader(data, BATCH // 2 // strategy.shares(8)),
            "valid": DataLoader(data, 20),
        }
        history = SupervisedRunner(device="cpu").train(
            model=model,
            criterion=criterion,
            optimizer=optimizer,
            num_epochs=5,
            distributed=strategy,
            accumulate=2,
            clip_norm=0.5,
            loaders=loaders,
        )
        momentum = {
            name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()
        }
        found[case] = model.state_dict(), momentum, history
    return found


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
@pytest.mark.rare
def test_every_mesh_trains_as_one_process_does() -> None:
    """Weights, momentum and losses after 20 steps, with uneven batches, accumulation, clipping, and
    targets that do not count."""
    ranks = in_world(8, trained)
    expected = {}
    for name in ("gpt", "mlp"):
        model, criterion, tensors = problem(name)
        optimizer = optimizer_of(model)
        batches = global_batches(SAMPLES, BATCH, seed=42, shuffle=False)
        train_by_hand(model, criterion, optimizer, tensors, batches, 20, clip_norm=0.5)
        momentum = {
            key: optimizer.state[p]["momentum_buffer"] for key, p in model.named_parameters()
        }
        with torch.no_grad():
            expected[name] = (
                model.state_dict(),
                momentum,
                float(criterion(model(tensors[0]), tensors[1])),
            )
    for case, (name, _) in CASES.items():
        weights, momentum, loss = expected[name]
        for rank, found in enumerate(ranks):
            mine, own, history = found[case]
            assert relative_difference(mine, weights) < 1e-6, (case, rank)
            assert relative_difference(own, momentum) < 5e-6, (case, rank)
            if name == "mlp":
                assert history["valid"]["loss"][-1] == pytest.approx(loss, rel=1e-6), (case, rank)


def test_neighbours_are_slices_and_stages_are_furthest_apart() -> None:
    degrees = Degrees(pp=2, replicate=2, shard=3, tp=2)
    places = [degrees.coordinates(rank) for rank in range(degrees.product)]
    assert [place["tp"][0] for place in places[:4]] == [0, 1, 0, 1]
    assert [place["dp_shard"][0] for place in places[:8]] == [0, 0, 1, 1, 2, 2, 0, 0]
    assert [place["pp"][0] for place in places[11:13]] == [0, 1]
    assert len({tuple(index for index, _ in place.values()) for place in places}) == degrees.product
