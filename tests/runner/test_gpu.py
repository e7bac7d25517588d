"""Training on GPUs: nccl, one process a card, the same weights as one GPU and as a hand-written
loop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

import allhands
from allhands import DDP, DP, Callback, SupervisedRunner, UserError, WorkerError, models
from allhands.data import catalogue
from allhands.data.feed import InMemoryFeed
from allhands.launch import spawn
from tests.reference import global_batches, relative_difference, train_by_hand
from tests.runner.problems import arguments, classification, classifier
from tests.runner.test_distributed import Fails

pytestmark = [pytest.mark.gpu, pytest.mark.serial]


def where() -> list[Any]:
    world = allhands.init()
    value = torch.ones(3, device=world.device)
    torch.distributed.all_reduce(value)
    found = [str(world.device), world.backend, torch.cuda.current_device(), value.tolist()]
    allhands.finalize()
    return found


@pytest.mark.gpu(2)
def test_one_process_a_card_under_nccl() -> None:
    assert spawn(where, workers=2) == [
        ["cuda:0", "nccl", 0, [2.0] * 3],
        ["cuda:1", "nccl", 1, [2.0] * 3],
    ]


def by_hand(model: nn.Module, samples: int, size: int, epochs: int, lr: float) -> nn.Module:
    model = model.cuda()
    data = classification(samples).tensors
    tensors = (data[0].cuda(), data[1].cuda())
    steps = -(-samples // size) * epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    train_by_hand(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        tensors,
        global_batches(samples, size, seed=42),
        steps,
        clip_norm=0.5,
    )
    return model.cpu()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_ddp_equals_the_hand_written_loop(workers: int, accumulate: int) -> None:
    model = classifier()
    SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        num_epochs=3,
        loaders={"train": DataLoader(classification(101), 8, shuffle=True)},
        accumulate=accumulate,
        clip_norm=0.5,
        distributed=True,
        workers=workers,
    )
    expected = by_hand(classifier(), 101, 8 * workers * accumulate, 3, 0.01)
    assert relative_difference(model.state_dict(), expected.state_dict()) < 1e-5


def digits(workers: int, precision: str, batch: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = models.build("simple_cnn", in_channels=1, num_classes=10, image_size=8)
    data = {split: catalogue.load("digits", split) for split in ("train", "valid")}
    history = SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        num_epochs=8,
        datasets={"batch_size": batch, **data},
        metrics=["accuracy"],
        precision=precision,
        distributed=True,
        workers=workers,
        **options,
    )
    return model, history


@pytest.mark.gpu(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_digits_on_two_cards_agree_with_one(precision: str) -> None:
    """In fp32 the first epoch's weights agree to rounding; in all formats the curves agree and the
    digits are learned."""
    _, one = digits(1, precision, 64)
    _, two = digits(2, precision, 32)
    assert two["valid"]["accuracy"][-1] >= 0.97
    tolerance = 1e-3 if precision == "fp32" else 3e-2
    assert two["train"]["loss"][0] == pytest.approx(one["train"]["loss"][0], rel=tolerance)
    assert abs(two["valid"]["accuracy"][-1] - one["valid"]["accuracy"][-1]) <= 0.02


@pytest.mark.gpu(2)
def test_cifar10_on_two_cards() -> None:
    root = os.environ.get("ALLHANDS_DATA")
    if not root or not (Path(root) / "cifar-10-batches-bin").is_dir():
        pytest.skip("ALLHANDS_DATA does not name a folder with cifar-10-batches-bin")
    torch.manual_seed(0)
    model = models.build("simple_cnn", in_channels=3, num_classes=10, image_size=32, width=64)
    data = {split: catalogue.load("cifar10", split) for split in ("train", "valid")}
    history = SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        num_epochs=3,
        datasets={"batch_size": 128, **data},
        metrics=["accuracy"],
        precision="bf16",
        distributed=True,
        workers=2,
    )
    print(history)
    assert history["valid"]["accuracy"][-1] > 0.65


@pytest.mark.gpu(2)
def test_dp_equals_single() -> None:
    weights = []
    for strategy in (False, DP()):
        given = arguments(distributed=strategy, num_epochs=2)
        given["optimizer"] = torch.optim.SGD(given["model"].parameters(), lr=0.1)
        SupervisedRunner().train(**given)
        assert next(given["model"].parameters()).device.type == "cpu", (
            "the model comes back to where it was"
        )
        weights.append(given["model"].state_dict())
    assert relative_difference(*weights) < 1e-5


def normalized() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


@pytest.mark.gpu(2)
def test_sync_batchnorm_equals_one_process() -> None:
    states = []
    for workers, batch, strategy in ((1, 16, DDP()), (2, 8, DDP(sync_batchnorm=True))):
        model = normalized()
        SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            num_epochs=2,
            loaders={"train": DataLoader(classification(64), batch, shuffle=True)},
            distributed=strategy,
            workers=workers,
        )
        states.append({key: value.float() for key, value in model.state_dict().items()})
    assert states[0].keys() == states[1].keys()
    assert relative_difference(*states) < 1e-4


def test_a_nan_loss_is_noticed_without_reading_every_loss(tmp_path: Path) -> None:
    x, y = classification().tensors
    x = x.clone()
    x[20] = float("nan")
    with pytest.raises(UserError, match="training loss is nan"):
        SupervisedRunner().train(
            **arguments(loaders={"train": DataLoader(TensorDataset(x, y), 8)}, logdir=tmp_path)
        )
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_a_failing_rank_ends_the_others_under_nccl(how: str) -> None:
    with pytest.raises(WorkerError) as caught:
        SupervisedRunner().train(
            **arguments(distributed=True, workers=2, num_epochs=50, callbacks=[Fails(how)])
        )
    assert caught.value.rank == 1


def test_more_workers_than_gpus() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(UserError, match=f"workers={count + 1}, but this machine shows {count} GPU"):
        SupervisedRunner().train(**arguments(distributed=True, workers=count + 1))


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    def run(logdir: Path, epochs: int) -> nn.Module:
        given = arguments(dropout=0.3, num_epochs=epochs, logdir=logdir, resume="auto")
        SupervisedRunner().train(**given)
        return given["model"]

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "cut", 2)
    resumed = run(tmp_path / "cut", 4)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
    )


@pytest.mark.gpu(2)
@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_interrupted_within_an_epoch_on_two_cards_and_resumed(how: str, tmp_path: Path) -> None:
    def run(logdir: Path, **more: Any) -> nn.Module:
        given = arguments(
            dropout=0.3,
            num_epochs=3,
            logdir=logdir,
            save_every=2,
            distributed=True,
            workers=2,
            **more,
        )
        SupervisedRunner().train(**given)
        return given["model"]

    whole = run(tmp_path / "whole", callbacks=[Callback()])
    with pytest.raises(WorkerError, match="planted fault" if how == "raise" else "SIGKILL"):
        run(tmp_path / "cut", callbacks=[Fails(how)])
    resumed = run(tmp_path / "cut", callbacks=[Callback()], resume="auto")
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
    )


@pytest.mark.gpu(2)
def test_a_loss_that_is_not_finite_ends_both_cards_at_the_same_step() -> None:
    x, y = classification().tensors
    x = x.clone()
    x[20] = float("nan")
    given = arguments(
        loaders={"train": DataLoader(TensorDataset(x, y), 8)}, distributed=True, workers=2
    )
    before = [parameter.detach().clone() for parameter in given["model"].parameters()]
    with pytest.raises(UserError, match="not finite|is nan"):
        SupervisedRunner().train(**given)
    # A failed training gives nothing back.
    assert all(torch.equal(a, b) for a, b in zip(before, given["model"].parameters(), strict=True))


def test_verify_on_cards() -> None:
    workers = [1, 2] if torch.cuda.device_count() > 1 else [1]
    given = arguments(distributed=True)
    for name in ("num_epochs", "metrics", "distributed"):
        del given[name]
    report = allhands.verify(**given, workers=workers, steps=8)
    assert report.ok, str(report)


class Watched(Callback):
    """From the third step to the twelfth nothing may wait for the GPU."""

    def __init__(self) -> None:
        self.watched = 0

    def on_step_end(self, training: Any) -> None:
        if training.step == 2:
            torch.cuda.set_sync_debug_mode("error")
        elif training.step == 12:
            torch.cuda.set_sync_debug_mode("default")
        elif 2 < training.step < 12:
            self.watched += 1


class Stream(IterableDataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


@pytest.mark.parametrize(
    "criterion",
    [nn.CrossEntropyLoss(), nn.MultiMarginLoss()],
    ids=["counts targets", "counts samples"],
)
@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_no_step_waits_for_the_card(kind: str, processes: int, criterion: nn.Module) -> None:
    """Batches come from a loader; losses, metrics, clipping and the optimizer leave nothing to be
    read."""
    data = classification(160)
    rows: Any = Subset(ConcatDataset([data]), range(160)) if kind == "map" else Stream(data)
    model, watched = classifier(), Watched()
    try:
        history = SupervisedRunner().train(
            model=model,
            criterion=criterion,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
            num_epochs=1,
            loaders={"train": DataLoader(rows, 4, num_workers=processes)},
            metrics=["accuracy"],
            clip_norm=0.5,
            accumulate=2,
            step="eager",
            callbacks=[watched],
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watched.watched == 9
    assert history["step"] == [20]


def test_data_that_does_not_fit_on_the_card_trains_as_data_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = []
    for fits in (True, False):
        monkeypatch.setattr(InMemoryFeed, "_fits_on_device", lambda feed, fits=fits: fits)
        given = arguments(dropout=0.3)
        SupervisedRunner().train(**given)
        weights.append(given["model"].state_dict())
    assert relative_difference(*weights) < 1e-5


def test_data_lies_on_the_card_and_predictions_come_back() -> None:
    model = classifier()
    data = classification(53)
    rows = SupervisedRunner().predict(model=model, loader=DataLoader(data, 8))
    assert rows.device.type == "cpu"
    assert torch.allclose(rows, model(data.tensors[0]), atol=1e-5)
