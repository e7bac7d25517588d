"""Models of own loops that are held in parts, or called on some ranks only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from tests.loop.own_loops import SLICES, assert_same, data, loaders, net, run, weights
from tests.worlds import in_world


def train_on_shards(workers: int) -> Any:
    model = net()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        # The last global batch of each loader has one sample.
        loaders={
            "train": DataLoader(data(), batch_size=26 // workers, shuffle=True),
            "valid": DataLoader(data(), batch_size=52 // workers),
        },
        strategy="fsdp" if workers > 1 else None,
    )

    def loss_of(batch: Any) -> torch.Tensor:
        return F.cross_entropy(loop.model(batch[0]), batch[1])

    for epoch in loop.epochs(2):
        for batch in epoch.train:
            loop.step(loss_of, batch)
        epoch.evaluate("valid", loss_of)
    return weights(model), loop.history["valid"]["loss"]


@pytest.mark.serial
def test_a_rank_without_a_sample_calls_the_model_with_the_others() -> None:
    expected, losses = train_on_shards(1)
    for found, measured in in_world(2, train_on_shards, 2):
        assert_same(found, expected)
        assert measured == pytest.approx(losses, abs=1e-5)


def train_on_three_samples(workers: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(6, 3))
    x, y = (part[:3] for part in data().tensors)
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(TensorDataset(x, y), batch_size=4 // workers)},
        strategy="fsdp" if workers > 1 else None,
    )
    run(loop, lambda batch: loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), batch))
    return weights(model)


@pytest.mark.serial
def test_ranks_with_other_numbers_of_samples_call_shards_equally_often() -> None:
    expected = train_on_three_samples(1)
    for found in in_world(2, train_on_three_samples, 2):
        assert_same(found, expected)


def call_the_plain_model(strategy: Any) -> None:
    model = net()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders=loaders(2),
        strategy=strategy,
    )
    run(loop, lambda batch: loop.step(lambda b: F.cross_entropy(model(b[0]), b[1]), batch))


def average_the_plain_model() -> None:
    model = net()
    allhands.Loop(
        models={"model": model, "average": torch.optim.swa_utils.AveragedModel(model)},
        optimizers={"model": torch.optim.SGD(model.parameters(), lr=0.1)},
        loaders=loaders(2),
        strategy="fsdp",
    )


@pytest.mark.serial
def test_a_model_of_which_a_copy_is_trained_is_not_used_itself() -> None:
    in_world(2, call_the_plain_model, "ddp")
    for strategy in ("fsdp", SLICES):
        with pytest.raises(allhands.UserError, match=r"parts of a copy of it; call loop\.model"):
            in_world(2, call_the_plain_model, strategy)
    with pytest.raises(allhands.UserError, match="models has 'average', an AveragedModel, and"):
        in_world(2, average_the_plain_model)


def train_halves(strategy: Any) -> Any:
    """One optimizer over two models."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 8), nn.Linear(8, 3)
    loop = allhands.Loop(
        models={"first": first, "second": second},
        optimizers={"both": torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)},
        loaders={"train": loaders(1)["train"]},
        strategy=strategy,
    )

    def loss_of(batch: Any) -> torch.Tensor:
        hidden = loop.models["first"](batch[0]).tanh()
        return F.cross_entropy(loop.models["second"](hidden), batch[1])

    run(loop, lambda batch: loop.step(loss_of, batch))
    return weights(first, second)


@pytest.mark.serial
def test_an_optimizer_over_two_models_trains_both_in_slices() -> None:
    plan = {"first": "colwise", "second": "rowwise"}
    for found in in_world(2, train_halves, allhands.Tensor(plan=plan)):
        assert_same(found, train_halves(None))
