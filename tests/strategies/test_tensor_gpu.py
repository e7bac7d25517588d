"""Slices of layers on GPUs under nccl: the same weights as a hand-written loop on one GPU; bf16;
dropout."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, TensorDataset

from allhands import Callback, Mesh, SupervisedRunner, Tensor
from allhands.models import NextToken
from tests.reference import global_batches, relative_difference, train_by_hand
from tests.strategies.sliced_models import BATCH, SAMPLES, gpt, sgd, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.serial]

SPLIT: dict[str, Any] = {"sequence_parallel": True, "loss_parallel": True}


def train(strategy: Any, workers: int, epochs: int, **options: Any) -> tuple[Any, Any]:
    model = gpt(width=32, heads=4, dropout=options.pop("dropout", 0.0))
    history = SupervisedRunner().train(
        model=model,
        criterion=NextToken(),
        optimizer=sgd(model),
        num_epochs=epochs,
        accumulate=2,
        clip_norm=0.5,
        loaders={"train": DataLoader(TensorDataset(*tokens()), BATCH, shuffle=True)},
        distributed=strategy,
        workers=workers,
        verbose=False,
        **options,
    )
    return model, history


def by_hand(shares: int) -> Any:
    model = gpt(width=32, heads=4).cuda()
    x, y = (values.cuda() for values in tokens())
    batches = global_batches(SAMPLES, BATCH * shares * 2, 42)
    train_by_hand(model, NextToken(), sgd(model), (x, y), batches, 20, clip_norm=0.5)
    return model.cpu()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("options", [{}, SPLIT])
def test_slices_on_two_cards_equal_the_hand_written_loop(options: dict[str, Any]) -> None:
    model, _ = train(Tensor(**options), 2, 5)
    assert relative_difference(model.state_dict(), by_hand(1).state_dict()) < 1e-5


@pytest.mark.gpu(4)
@pytest.mark.parametrize("dp", [2, {"shard": 2}])
def test_slices_with_copies_and_with_shards_on_four_cards_equal_it_too(dp: Any) -> None:
    model, _ = train(Mesh(dp=dp, tp=2, tensor=Tensor(**SPLIT)), 4, 10)
    assert relative_difference(model.state_dict(), by_hand(2).state_dict()) < 1e-5


@pytest.mark.gpu(2)
def test_bf16_learns_as_fp32_does() -> None:
    _, exact = train(Tensor(), 2, 5)
    _, narrow = train(Tensor(**SPLIT), 2, 5, precision="bf16")
    assert narrow["train"]["loss"][-1] == pytest.approx(exact["train"]["loss"][-1], rel=0.02)


class Equal(Callback):
    """The weights that all workers hold are equal to the last bit after each step."""

    def on_step_end(self, training: Any) -> None:
        training.loop.exchange.check_equal(f"at step {training.step}")


@pytest.mark.gpu(2)
def test_dropout_leaves_the_workers_of_a_group_alike() -> None:
    _, first = train(Tensor(**SPLIT), 2, 5, dropout=0.3, callbacks=[Equal()])
    _, again = train(Tensor(**SPLIT), 2, 5, dropout=0.3)
    assert first["train"]["loss"] == again["train"]["loss"]
