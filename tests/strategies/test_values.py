"""Models on the meta device begin with the values that plain building gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, FSDP, SupervisedRunner, UserError
from allhands.data import derive_seed
from allhands.loop.checkpoint import load
from allhands.models import GPT, MLP
from allhands.strategies.values import Values
from allhands.world import World
from tests.reference import global_batches, relative_difference, train_by_hand
from tests.strategies.test_fsdp import Tail, tensors


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_a_model_on_the_meta_device_begins_with_the_weights_of_plain_building(
    tmp_path: Path,
) -> None:
    torch.manual_seed(derive_seed(42, "model"))
    plain = MLP(6, (8, 9), 7)
    x, y = tensors(8)
    with torch.device("meta"):
        model = MLP(6, (8, 9), 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        distributed=FSDP(),
        workers=3,
        logdir=tmp_path,
        loaders={"train": DataLoader(TensorDataset(x, y), 2)},
    )
    assert all(parameter.is_meta for parameter in model.parameters())
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.5)
    train_by_hand(
        plain,
        nn.CrossEntropyLoss(),
        by_hand,
        (x, y),
        global_batches(8, 6, seed=42, shuffle=False),
        2,
    )
    assert relative_difference(load(tmp_path)["model"], plain.state_dict()) < 1e-6


@pytest.mark.parametrize("tied", [True, False])
def test_values_are_those_of_plain_building_in_any_order(tied: bool) -> None:
    torch.manual_seed(derive_seed(7, "model"))
    plain = GPT(20, 4, 2, 2, 8, tied=tied)
    with torch.device("meta"):
        model = GPT(20, 4, 2, 2, 8, tied=tied)
    before = torch.get_rng_state()
    values = Values(
        model, model, World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "alone"), seed=7
    )
    values.settle(model, list(model.layers[1].parameters()))
    values.settle(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.head.weight is model.embed.weight) == tied
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_values_that_cannot_be_known_are_named(kind: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Tail() if kind == "parameter" else nn.BatchNorm1d(2))
    if kind == "parameter":
        model[1].shift = torch.zeros(7)
    with pytest.raises(
        UserError,
        match="'1' \\(Tail\\) has parameters but no"
        if kind == "parameter"
        else r"its buffer '1\.running_mean'",
    ):
        Values(model, model, World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "alone"), seed=7)


def test_a_model_on_the_meta_device_needs_a_place_for_its_weights() -> None:
    with torch.device("meta"):
        model = MLP(6, (8,), 7)
    for strategy, said in ((FSDP(), "pass logdir="), (DDP(), "distributed='fsdp'")):
        with pytest.raises(UserError, match=said):
            SupervisedRunner(device="cpu").train(
                model=model,
                criterion=nn.CrossEntropyLoss(),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
                loaders={"train": DataLoader(TensorDataset(*tensors(8)), 2)},
                distributed=strategy,
                workers=2,
            )


def test_a_model_on_the_meta_device_cannot_be_applied() -> None:
    with torch.device("meta"):
        runner = SupervisedRunner(MLP(6, (8,), 7), device="cpu")
    x, y = tensors(8)
    with pytest.raises(
        UserError, match=r"predict computes with the whole model.*load_checkpoint\(logdir\)"
    ):
        runner.predict(dataset=TensorDataset(x))
    with pytest.raises(UserError, match="evaluate computes with the whole model"):
        runner.evaluate(
            criterion=nn.CrossEntropyLoss(),
            datasets={"batch_size": 4, "valid": TensorDataset(x, y)},
        )
