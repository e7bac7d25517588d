"""Collate functions that drop or make rows: what came is what counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from allhands import KVStore, LocalSGD, SupervisedRunner, UserError
from tests.reference import Slope, mean_output
from tests.worlds import in_world

VALUES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
Pair = tuple[torch.Tensor, torch.Tensor]


class Numbers(Dataset[Any]):
    """1, 2, 4, …, each with how often it is to come."""

    def __init__(self, times: list[int]) -> None:
        self.times = times

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, index: int) -> tuple[float, int]:
        return VALUES[index], self.times[index]


class Stream(IterableDataset[Any]):
    def __init__(self, times: list[int]) -> None:
        self.numbers = Numbers(times)

    def __iter__(self) -> Any:
        return (self.numbers[index] for index in range(len(self.numbers)))


def as_often(batch: list[tuple[float, int]]) -> Pair | None:
    """Rows of shape [1]; None where there is none."""
    rows = [value for value, times in batch for _ in range(times)]
    return (torch.tensor(rows)[:, None], torch.tensor(rows)) if rows else None


def gradients(
    times: list[int], batch_size: int, cells: list[dict[str, Any]], stream: bool = False
) -> list[list[float]]:
    """By cell: the gradients of the mean of the values by step (one that is left out has none), and
    the losses of the epoch."""
    data = Stream(times) if stream else Numbers(times)
    found = []
    for cell in cells:
        model = Slope() if cell.get("distributed") != "fsdp" else Line()
        weight = next(model.parameters())
        torch.nn.init.ones_(weight)
        history = SupervisedRunner(device="cpu").train(
            model=model,
            criterion=mean_output,
            optimizer=torch.optim.SGD([weight], lr=1.0),
            metrics={"mean": mean_output},
            loaders={
                "train": DataLoader(data, batch_size=batch_size, collate_fn=as_often),
                "valid": DataLoader(data, batch_size=batch_size, collate_fn=as_often),
            },
            **cell,
        )
        values = history["valid"]
        found.append(
            [1 - weight.item(), history["train"]["loss"][0], values["loss"][0], values["mean"][0]]
        )
    return found


class Line(nn.Module):
    """`Slope` with a weight of one dimension, which fully_shard can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def mean(times: list[int], first: int = 0, last: int = 6) -> float:
    return sum(v * n for v, n in zip(VALUES[first:last], times[first:last], strict=False)) / max(
        1, sum(times[first:last])
    )


def right(times: list[int], size: int) -> tuple[float, float, float]:
    """The sum of the steps' gradients, and the losses of training and evaluation, by hand."""
    weight, losses, rows = 1.0, 0.0, 0
    for first in range(0, len(times), size):
        count = sum(times[first : first + size])
        if count:
            gradient = mean(times, first, first + size)
            losses, rows, weight = (
                losses + weight * gradient * count,
                rows + count,
                weight - gradient,
            )
    return 1 - weight, losses / rows, weight * mean(times)


TIMES = {
    "one dropped": [1, 0, 1, 1],
    "some more": [1, 3, 0, 2],
    "second half dropped": [1, 1, 0, 0],
    "first half dropped": [0, 0, 1, 2],
    "a step without a row": [0, 0, 0, 0, 1, 1],
}
RARE = ("one dropped", "second half dropped", "first half dropped")


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_rows_count_in_one_process(times: list[int]) -> None:
    for size, cell in ((4, {}), (2, {"accumulate": 2})):
        (found,) = gradients(times, size, [cell])
        assert found == pytest.approx([*right(times, 4), right(times, 4)[2]])


# rare: the others are counted in one process above.
@pytest.mark.serial
@pytest.mark.parametrize(
    "times",
    [
        pytest.param(times, id=name, marks=[pytest.mark.rare] if name in RARE else [])
        for name, times in TIMES.items()
    ],
)
def test_rows_count_under_every_strategy(times: list[int]) -> None:
    cells: list[dict[str, Any]] = [
        {"distributed": "ddp"},
        {"distributed": "kvstore"},
        {"distributed": KVStore(update="worker")},
        {"distributed": LocalSGD(every=1)},
        {"distributed": "fsdp"},
    ]
    for found in in_world(2, gradients, times, 2, cells):
        for cell, numbers in zip(cells, found, strict=True):
            assert numbers == pytest.approx([*right(times, 4), right(times, 4)[2]]), cell
    for found in in_world(2, gradients, times, 1, [{"distributed": "ddp", "accumulate": 2}], True):
        assert found[0][0] == pytest.approx(right(times, 4)[0])


def predicted(times: list[int], workers: int | None) -> list[float]:
    loader = DataLoader(Numbers(times), batch_size=2, collate_fn=as_often)
    distributed = {} if workers is None else {"distributed": "ddp"}
    return (
        SupervisedRunner(device="cpu")
        .predict(model=nn.Identity(), loader=loader, **distributed)
        .flatten()
        .tolist()
    )


@pytest.mark.serial
def test_predict_gives_a_row_for_each_that_came() -> None:
    times = [0, 0, 2, 1, 1, 0]
    assert predicted(times, None) == [4.0, 4.0, 8.0, 16.0]
    assert in_world(2, predicted, times, 2) == [[4.0, 4.0, 8.0, 16.0]] * 2
    with pytest.raises(UserError, match="dropped every sample"):
        predicted([0, 0], None)


def test_a_runner_says_itself_how_many_rows_there_are() -> None:
    class Named(SupervisedRunner):
        def rows_of(self, batch: Any) -> int | None:
            return len(batch["names"])

        def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
            return model(batch["x"]), None

    def collate(batch: list[Any]) -> Any:
        value, _ = default_collate(batch)
        return {"x": value.float()[None], "names": ["row"] * len(value)}

    model = Slope()
    Named(device="cpu").train(
        model=model,
        criterion=mean_output,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        accumulate=2,
        loaders={"train": DataLoader(Numbers([1, 1, 1]), batch_size=2, collate_fn=collate)},
    )
    assert -model.w.item() == pytest.approx(7 / 3)


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (None, 0),
        ((), 0),
        ((torch.rand(3, 2), torch.rand(3)), 3),
        ((torch.rand(3, 2), None), 3),
        (torch.rand(5), 5),
        ({"features": torch.rand(4, 2), "targets": ["a"]}, 4),
        (([torch.rand(3, 8, 8)] * 2, [{}, {}]), 2),
        (([torch.rand(3, 8, 8)], ["a"]), None),
        (object(), None),
    ],
)
def test_rows_of_a_batch(batch: Any, rows: int | None) -> None:
    assert SupervisedRunner().rows_of(batch) == rows
