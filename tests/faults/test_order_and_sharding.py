"""Which samples, in which order: shuffled against the user's word, read by every rank, the same in
each epoch.

Kinds of fault: pytorch/pytorch#31771 (the same order each epoch),
Lightning-AI/pytorch-lightning#10170 and #21131 (shuffled, or
the sampler undone), huggingface/datasets#5360 and Lightning-AI/pytorch-lightning#15734 (streams
read in full by each rank). The dealing itself is tested in tests/data over many sizes; here it is
what models are given in a real world.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from allhands import DDP, SupervisedRunner
from allhands.data import global_order
from tests.faults.probes import Found, probe, size
from tests.reference import Slope, mean_output

pytestmark = pytest.mark.serial

EPOCHS = 2


class Recording(SupervisedRunner):
    """Keeps what the model was given on this rank, step by step."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.seen: list[list[int]] = []

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        self.seen.append(batch[0].int().tolist())
        return super().handle_batch(model, batch)


class Stream(IterableDataset[Any]):
    """The numbers from 0 on."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor(float(n)), torch.tensor(0.0)) for n in range(self.length))


def seen(loader: Any, epochs: int = EPOCHS, **options: Any) -> list[list[int]]:
    model, runner = Slope(), Recording()
    runner.train(
        model=model,
        criterion=mean_output,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loaders={"train": loader},
        distributed=DDP(),
        num_epochs=epochs,
        **options,
    )
    return runner.seen


def numbers(length: int) -> TensorDataset:
    x = torch.arange(float(length))
    return TensorDataset(x, x)


def put_together(ranks: list[list[list[int]]], steps: int) -> list[int]:
    """The samples of `steps` full optimizer steps in their global order: the ranks' shares, step by
    step."""
    return [sample for step in range(steps) for rank in ranks for sample in rank[step]]


@probe
def orders() -> dict[str, list[list[int]]]:
    length = 6 * size()  # 3 steps of 2 a rank
    return {
        "in order": seen(DataLoader(numbers(length), 2)),
        "shuffled": seen(DataLoader(numbers(length), 2, shuffle=True), seed=7),
        "again": seen(DataLoader(numbers(length), 2, shuffle=True), seed=7),
        "sampler": seen(DataLoader(numbers(length), 2, sampler=list(range(length - 1, -1, -1)))),
        "weighted": seen(
            DataLoader(
                numbers(length),
                2,
                sampler=WeightedRandomSampler([1.0] + [0.0] * (length - 1), length),
            )
        ),
        "stream": seen(DataLoader(Stream(length), 2)),
        "stream, loader process": seen(DataLoader(Stream(length), 2, num_workers=1)),
    }


def test_what_is_not_shuffled_comes_in_order_in_every_epoch(found: Found) -> None:
    ranks = [result["in order"] for result in found(orders)]
    assert put_together(ranks, 6) == list(range(6 * found.workers)) * EPOCHS


def test_what_is_shuffled_comes_in_the_one_order_of_its_epoch(found: Found) -> None:
    ranks, length = [result["shuffled"] for result in found(orders)], 6 * found.workers
    first, second = global_order(length, 7, 0).tolist(), global_order(length, 7, 1).tolist()
    assert first != second
    assert put_together(ranks, 6) == first + second
    assert ranks == [result["again"] for result in found(orders)]


def test_a_custom_sampler_stays_as_it_is(found: Found) -> None:
    length = 6 * found.workers
    assert (
        put_together([result["sampler"] for result in found(orders)], 6)
        == list(range(length - 1, -1, -1)) * EPOCHS
    )
    assert (
        put_together([result["weighted"] for result in found(orders)], 6) == [0] * length * EPOCHS
    )


@pytest.mark.parametrize("kind", ["stream", "stream, loader process"])
def test_a_stream_is_read_once_by_all_ranks_together(found: Found, kind: str) -> None:
    ranks = [result[kind] for result in found(orders)]
    assert put_together(ranks, 6) == list(range(6 * found.workers)) * EPOCHS


TAILS = [(n, batch, drop) for n in (8, 9, 10) for batch in (2, 5) for drop in (False, True)]


@probe
def tails() -> dict[str, list[int]]:
    found = {}
    for n, batch, drop in TAILS:
        if not drop or n >= batch * size():
            batches = seen(DataLoader(numbers(n), batch, drop_last=drop), epochs=1)
            found[f"{n}/{batch}/{drop}"] = [sample for one in batches for sample in one]
    return found


@pytest.mark.parametrize(("n", "batch", "drop"), TAILS)
def test_no_sample_is_repeated_or_lost(found: Found, n: int, batch: int, drop: bool) -> None:
    full = batch * found.workers
    kept = n // full * full if drop else n
    results = [result.get(f"{n}/{batch}/{drop}") for result in found(tails)]
    if kept == 0:  # an error, tested in test_metrics_and_padding.py
        assert results == [None] * found.workers
        return
    assert sorted(sample for ids in results for sample in ids or []) == list(range(kept))


@probe
def a_short_stream() -> float:
    """1, 2, 3, 4 in one global batch, whatever the world."""
    model = Slope()
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=mean_output,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loaders={"train": DataLoader(Stream(5), 5)},
        distributed=DDP(),
    )
    return -float(model.w.detach())


def test_a_stream_shorter_than_a_global_batch_is_one_exact_step(found: Found) -> None:
    assert found(a_short_stream) == pytest.approx([2.0] * found.workers)
