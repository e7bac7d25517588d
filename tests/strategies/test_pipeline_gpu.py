"""Stages on GPUs under nccl: the same weights as a loop by hand on one GPU, alone and with copies
and shards; bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Mesh, Pipeline, SupervisedRunner
from allhands.models import GPT, NextToken
from tests.reference import global_batches, relative_difference, train_by_hand
from tests.strategies.test_pipeline import BATCH, LENGTH, SAMPLES, VOCABULARY, away_from_zero, words

pytestmark = [pytest.mark.gpu, pytest.mark.serial]


def make_gpt() -> nn.Module:
    """Heads of 8 features, since fused attention in bf16 works on multiples of 8."""
    torch.manual_seed(3)
    return away_from_zero(GPT(VOCABULARY, LENGTH, layers=6, heads=4, width=32))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)


def train(strategy: Any, workers: int, epochs: int, **options: Any) -> tuple[nn.Module, Any]:
    model, tensors = make_gpt(), TensorDataset(*words())
    history = SupervisedRunner().train(
        model=model,
        criterion=NextToken(),
        optimizer=sgd(model),
        num_epochs=epochs,
        accumulate=2,
        clip_norm=0.5,
        loaders={
            "train": DataLoader(tensors, BATCH, shuffle=True),
            "valid": DataLoader(tensors, BATCH),
        },
        distributed=strategy,
        workers=workers,
        verbose=False,
        **options,
    )
    return model, history


def by_hand(shares: int) -> nn.Module:
    model = make_gpt().cuda()
    x, y = (values.cuda() for values in words())
    batches = global_batches(SAMPLES, BATCH * shares * 2, 42)
    train_by_hand(model, NextToken(), sgd(model), (x, y), batches, 12, clip_norm=0.5)
    return model.cpu()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_stages_on_two_cards_equal_the_hand_written_loop(schedule: str) -> None:
    model, history = train(Pipeline(schedule=schedule, microbatches=4), 2, 4)
    expected = by_hand(1)
    assert relative_difference(model.state_dict(), expected.state_dict()) < 1e-5
    x, y = words()
    with torch.no_grad():
        assert history["valid"]["loss"][-1] == pytest.approx(
            float(NextToken()(expected(x), y)), rel=1e-4
        )


@pytest.mark.gpu(4)
@pytest.mark.parametrize("dp", [2, {"shard": 2}])
def test_stages_with_copies_and_with_shards_on_four_cards_equal_it_too(dp: Any) -> None:
    model, _ = train(Mesh(pp=2, dp=dp, pipeline=Pipeline(microbatches=4)), 4, 6)
    assert relative_difference(model.state_dict(), by_hand(2).state_dict()) < 1e-5


@pytest.mark.gpu(2)
def test_measured_stages_on_two_cards_equal_it_too() -> None:
    model, _ = train(Pipeline(microbatches=4, balance="measured"), 2, 4)
    assert relative_difference(model.state_dict(), by_hand(1).state_dict()) < 1e-5


@pytest.mark.gpu(2)
@pytest.mark.parametrize("balance", ["parameters", "measured"])
def test_bf16_learns_as_fp32_does(balance: str) -> None:
    _, exact = train(Pipeline(microbatches=4), 2, 4)
    _, narrow = train(Pipeline(microbatches=4, balance=balance), 2, 4, precision="bf16")
    assert narrow["train"]["loss"][-1] == pytest.approx(exact["train"]["loss"][-1], rel=0.02)
