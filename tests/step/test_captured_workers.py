"""Steps of several workers captured in CUDA graphs, with the exchange under nccl: the weights of
eager steps, and of one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, FSDP, Callback, SupervisedRunner, Tensor, UserError
from allhands.models.transformer import GPT, NextToken
from tests.reference import global_batches, relative_difference, train_by_hand

pytestmark = [pytest.mark.gpu, pytest.mark.serial]

CARDS = [
    pytest.param(1),
    pytest.param(2, marks=pytest.mark.gpu(2)),
    pytest.param(4, marks=pytest.mark.gpu(4)),
]
SAMPLES = 203  # uneven over any number of cards


class Exact(Callback):
    """Convolutions in fp32, not in TF32, whose rounding hides what is compared."""

    def on_train_start(self, training: Any) -> None:
        torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(autouse=True)
def without_tf32() -> Iterator[None]:
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


def images() -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (SAMPLES,), generator=drawn)
    labels[::7] = -100  # ignored
    return TensorDataset(torch.randn(SAMPLES, 3, 8, 8, generator=drawn), labels)


def convolutions(normalised: bool = False) -> nn.Module:
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(8) if normalised else nn.GroupNorm(2, 8)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        norm,
        nn.ReLU(),
        nn.Dropout(0.1 if normalised else 0.0),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )


def train(step: str, workers: int, model: nn.Module, **options: Any) -> nn.Module:
    made: dict[str, Any] = {
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "num_epochs": 8,
        "clip_norm": 0.5,
        "loaders": {"train": DataLoader(images(), 16 // workers, shuffle=True)},
        "distributed": DDP(bucket_cap_mb=0.01),
        "callbacks": [Exact()],
    }
    SupervisedRunner().train(model=model, workers=workers, step=step, **made | options)
    return model


@pytest.mark.parametrize("workers", CARDS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_captured_steps_equal_the_hand_written_loop(workers: int, accumulate: int) -> None:
    model, by_hand = (
        train("graph", workers, convolutions(), accumulate=accumulate),
        convolutions().cuda(),
    )
    data = tuple(tensor.cuda() for tensor in images().tensors)
    size = 16 * accumulate
    train_by_hand(
        by_hand,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(by_hand.parameters(), lr=0.05, momentum=0.9),
        data,
        global_batches(SAMPLES, size, seed=42),
        8 * -(-SAMPLES // size),
        clip_norm=0.5,
    )
    assert relative_difference(model.state_dict(), by_hand.cpu().state_dict()) < 1e-5


@pytest.mark.parametrize("workers", CARDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_steps_equal_eager_ones(
    workers: int, precision: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """BatchNorm's statistics, dropout and a schedule included."""
    models = []
    for step in ("graph", "eager"):
        model = convolutions(normalised=True).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        models.append(
            train(
                step, workers, model, optimizer=optimizer, scheduler=schedule, precision=precision
            )
        )
    assert "step: captured in a CUDA graph" in capfd.readouterr().out
    found = relative_difference(models[0].state_dict(), models[1].state_dict())
    assert found < (1e-5 if precision == "fp32" else 2e-2), found


@pytest.mark.gpu(2)
def test_a_resumed_training_goes_on_to_the_bit(tmp_path: Any) -> None:
    whole = train("graph", 2, convolutions(), num_epochs=6, logdir=tmp_path / "whole")
    train("graph", 2, convolutions(), num_epochs=3, logdir=tmp_path / "parts")
    parts = train(
        "graph", 2, convolutions(), num_epochs=6, logdir=tmp_path / "parts", resume="auto"
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True)
    )


class ReadsOnOne(nn.Linear):
    """Waits for the device on one of the ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if torch.distributed.get_rank() == 1:
            y = y if float(y.sum()) < 1e9 else -y
        return y


def linear(layer: type[nn.Linear]) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), layer(192, 5))


@pytest.mark.gpu(2)
def test_one_rank_may_be_eager() -> None:
    """A rank that cannot capture exchanges with one that does."""
    one, other = train("auto", 2, linear(ReadsOnOne)), train("eager", 2, linear(nn.Linear))
    assert relative_difference(one.state_dict(), other.state_dict()) < 1e-5
    with pytest.raises(
        UserError,
        match=r"step='graph': the step cannot be captured, since it waits for the device at "
        r".*test_captured_workers",
    ):
        train("graph", 2, linear(ReadsOnOne))


class Looks(Callback):
    def on_step_end(self, training: Any) -> None:
        gradients = [p.grad for p in training.model.parameters()]
        training.log("norm", torch.nn.utils.get_total_norm(gradients))


@pytest.mark.gpu(2)
def test_gradients_after_a_step_are_the_exchanged_ones() -> None:
    norms = []
    for step in ("graph", "eager"):
        model = convolutions()
        loaders = {"train": DataLoader(images(), 8, shuffle=True)}
        history = SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
            num_epochs=3,
            loaders=loaders,
            distributed="ddp",
            workers=2,
            step=step,
            callbacks=[Looks()],
        )
        norms.append(history["train"]["norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "strategy",
    [DDP(optimizer_state="sharded"), FSDP(), FSDP(reshard_after_forward=False), Tensor()],
    ids=["sharded", "fsdp", "fsdp-kept", "tensor"],
)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_models_and_states_in_parts_are_captured(
    strategy: Any, again: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    models = []
    for step in ("graph", "eager"):
        torch.manual_seed(3)
        model = GPT(64, 32, 3, 4, 64, tied=False)
        drawn = torch.Generator().manual_seed(0)
        tokens = torch.randint(64, (101, 33), generator=drawn)
        data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        models.append(
            train(
                step,
                2,
                model,
                criterion=NextToken(),
                loaders={"train": DataLoader(data, 4, shuffle=True)},
                optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
                distributed=strategy,
                activation_checkpointing=again,
            )
        )
    assert "step: captured in a CUDA graph" in capfd.readouterr().out
    assert relative_difference(models[0].state_dict(), models[1].state_dict()) < 1e-3
