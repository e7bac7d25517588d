"""Epochs of a number of optimizer steps: they go on in the data, over its passes, and end for
streams without an end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from allhands import Callback, Federated, SupervisedRunner, UserError
from tests.runner.problems import StopAt
from tests.worlds import in_world

ROWS = torch.arange(1.0, 11.0).view(-1, 1)  # 5 batches of 2


class Seen(SupervisedRunner):
    """Notes the samples of each batch that is trained on."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.samples: list[list[int]] = []

    def handle_batch(self, model: nn.Module, batch: Any) -> Any:
        if model.training:
            self.samples.append(batch[0].flatten().int().tolist())
        return model(batch[0]), batch[1]


class Endless(IterableDataset[Any]):
    """1, 2, 3, … without an end; passes are counted."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        Endless.passes += 1
        return ((torch.tensor([float(number)]), torch.zeros(1)) for number in itertools.count(1))


def train(
    steps: int | None, epochs: int, data: Any = None, **options: Any
) -> tuple[Seen, nn.Module, Any]:
    runner, model = Seen(), nn.Linear(1, 1)
    nn.init.constant_(model.weight, 1.0)
    nn.init.zeros_(model.bias)
    given: dict[str, Any] = {
        "loaders": {
            "train": DataLoader(data or TensorDataset(ROWS, ROWS * 2), 2),
            "valid": DataLoader(TensorDataset(ROWS, ROWS * 2), 5),
        },
        "distributed": False,
    }
    history = runner.train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.5),
        num_epochs=epochs,
        steps_per_epoch=steps,
        **given | options,
    )
    return runner, model, history


def test_epochs_go_on_in_the_data_and_over_its_passes() -> None:
    runner, model, history = train(3, 5)
    assert history["step"] == [3, 6, 9, 12, 15]
    assert len(history["valid"]["loss"]) == 5
    assert runner.samples == [[n, n + 1] for n in (1, 3, 5, 7, 9)] * 3
    _, plain, _ = train(None, 3)
    assert torch.equal(model.weight, plain.weight)


def test_shuffled_passes_have_the_orders_of_epochs() -> None:
    def shuffled() -> Any:
        return {"train": DataLoader(TensorDataset(ROWS, ROWS * 2), 2, shuffle=True)}

    cut, _, _ = train(3, 5, loaders=shuffled())
    whole, _, _ = train(None, 3, loaders=shuffled())
    assert cut.samples == whole.samples


def test_an_epoch_may_be_longer_than_the_data() -> None:
    runner, _, history = train(7, 1)
    assert history["step"] == [7]
    assert runner.samples[5:] == [[1, 2], [3, 4]]


def test_a_stream_without_an_end_is_read_once(capsys: pytest.CaptureFixture[str]) -> None:
    Endless.passes = 0
    runner, _, history = train(4, 3, Endless())
    assert history["step"] == [4, 8, 12]
    assert runner.samples == [[2 * n + 1, 2 * n + 2] for n in range(12)]
    assert Endless.passes == 1
    assert "4 steps an epoch" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "steps"), [("check", [2, 4, 6]), ("overfit", [1, 2, 3])])
def test_check_and_overfit_keep_their_meaning(option: str, steps: list[int]) -> None:
    runner, _, history = train(2, 3, Endless(), **{option: True})
    assert history["step"] == steps
    assert (runner.samples == [[1, 2]] * 3) == (option == "overfit")


@pytest.mark.parametrize("data", [None, Endless()])
@pytest.mark.parametrize("within", [False, True])
def test_a_resumed_training_goes_on_in_the_data(tmp_path: Path, data: Any, within: bool) -> None:
    whole, model, history = train(3, 4, data)
    last = StopAt(5) if within else Callback()
    first, _, _ = train(3, 4 if within else 2, data, logdir=tmp_path, callbacks=[last])
    rest, again, resumed = train(3, 4, data, logdir=tmp_path, callbacks=[Callback()], resume="auto")
    assert first.samples + rest.samples == whole.samples
    assert torch.equal(model.weight, again.weight)
    assert resumed["train"] == history["train"]


def test_a_checkpoint_within_a_pass_needs_steps_per_epoch(tmp_path: Path) -> None:
    train(3, 2, logdir=tmp_path)
    with pytest.raises(
        UserError, match=r"written with steps_per_epoch.*pass steps_per_epoch here too"
    ):
        train(None, 4, logdir=tmp_path, resume="auto")


def test_whole_epochs_go_on_as_passes(tmp_path: Path) -> None:
    train(None, 2, logdir=tmp_path)
    runner, _, history = train(3, 3, logdir=tmp_path, resume="auto")
    assert history["step"] == [5, 10, 13]
    assert runner.samples == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("steps", [0, 2.0, True])
def test_other_numbers_are_refused(steps: Any) -> None:
    with pytest.raises(UserError, match="steps_per_epoch=.*whole number of optimizer steps"):
        train(steps, 1)


def test_data_without_a_batch_is_an_error() -> None:
    empty = {"train": DataLoader(TensorDataset(ROWS[:1], ROWS[:1]), 2, drop_last=True)}
    with pytest.raises(UserError, match="loader 'train' gives no batch"):
        train(3, 1, loaders=empty)


def test_federated_rounds_have_none() -> None:
    with pytest.raises(UserError, match="steps_per_epoch=3 with distributed=Federated"):
        train(3, 1, distributed=Federated(clients=2, rounds=1))


def on_two_workers() -> Any:
    return [
        train(steps, epochs, data)[0].samples
        for steps, epochs, data in ((3, 3, Endless()), (4, 2, None))
    ]


@pytest.mark.serial
def test_on_two_workers_each_sample_comes_once(preloaded: None) -> None:
    streams, rows = zip(*in_world(2, on_two_workers), strict=True)
    taken = [sorted(a + b) for a, b in zip(*streams, strict=True)]
    assert taken == [list(range(4 * n + 1, 4 * n + 5)) for n in range(9)]
    taken = [sorted(a + b) for a, b in zip(*rows, strict=True)]
    one_pass = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert taken == (one_pass * 3)[:8]


@pytest.mark.parametrize(("length", "fits"), [(6, True), (5, False)])
def test_the_length_of_a_schedule_is_compared_with_these_epochs(length: int, fits: bool) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.5)

    def run() -> Any:
        return SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=optimizer,
            num_epochs=2,
            steps_per_epoch=3,
            scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=length),
            loaders={"train": DataLoader(Endless(), 2)},
        )

    if fits:
        assert run()["step"] == [3, 6]
    else:
        with pytest.raises(UserError, match="write total_steps=6"):
            run()
