"""Interrupted trainings of every kind: number formats, accumulation, loader processes, samplers,
streams."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

import allhands
from allhands import SupervisedRunner
from allhands.comm import all_gather_text
from tests.faults.probes import Found, probe_each
from tests.faults.test_resume import same_bits
from tests.runner.problems import StopAt, classification

pytestmark = pytest.mark.serial

SAMPLES = 54


class Augmented(Dataset[Any]):
    """Adds noise of numpy and torch to every sample."""

    def __init__(self) -> None:
        self.x, self.y = classification(SAMPLES).tensors

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.3 * torch.randn(5) + 0.3 * float(np.random.randn()), self.y[index]


class Stream(IterableDataset[Any]):
    """A stream in a random order, with noise."""

    def __iter__(self) -> Iterator[Any]:
        data = Augmented()
        for index in torch.randperm(SAMPLES).tolist():
            yield data[index]


class Growing(BatchSampler):
    """Batches of 2, 3, 4, 5, 2, 3, … of a random order."""

    def __iter__(self) -> Iterator[list[int]]:
        order, number = list(self.sampler), 0
        while order:
            take = 2 + number % 4
            yield order[:take]
            order, number = order[take:], number + 1

    def __len__(self) -> int:
        return 16


def with_seed() -> torch.Generator:
    return torch.Generator().manual_seed(4)


KINDS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "accumulated": {"accumulate": 2, "clip_norm": 0.5},
    "read in the worker": {"data": "augmented"},
    "loader processes": {"data": "augmented", "num_workers": 2},
    "sampler with a generator": {"data": "weighted"},
    "batch sampler": {"data": "growing"},
    "stream": {"data": "stream"},
    "epochs that end within a pass": {"steps_per_epoch": 9},
    "batch sampler, epochs that end within a pass": {"data": "growing", "steps_per_epoch": 9},
    "stream, epochs that end within a pass": {"data": "stream", "steps_per_epoch": 9},
}


# The others combine them, or are resumed in tests of their own strategy or data.
COMMON = ("accumulated", "loader processes", "stream")
RARE = [kind for kind in KINDS if kind not in COMMON]


def loader(data: str, num_workers: int) -> DataLoader[Any]:
    plain = classification(SAMPLES)
    if data == "augmented":
        return DataLoader(Augmented(), 4, shuffle=True, num_workers=num_workers)
    if data == "weighted":
        return DataLoader(
            plain, 4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=with_seed())
        )
    if data == "growing":
        return DataLoader(
            plain,
            batch_sampler=Growing(RandomSampler(plain, generator=with_seed()), 4, drop_last=False),
        )
    if data == "stream":
        return DataLoader(Stream(), 4)
    return DataLoader(plain, 4, shuffle=True)


def run(
    logdir: Path | None, step: int, data: str = "plain", num_workers: int = 0, **options: Any
) -> Any:
    torch.default_generator.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        loaders={"train": loader(data, num_workers)},
        metrics=["accuracy"],
        num_epochs=2,
        callbacks=[StopAt(step)],
        logdir=logdir,
        resume="auto" if logdir else None,
        **options,
    )
    history.pop("seconds")
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "history": history,
    }


@probe_each(KINDS, rare=RARE)
def resumed(kind: str) -> list[list[str]]:
    """Stop within the first epoch and within the second, go on, and say what differs from a run
    that was not stopped."""
    world = allhands.current_world()
    assert world is not None
    whole = run(None, 0, **KINDS[kind])
    each_epoch = whole["history"]["step"][0]
    differing = []
    for step in (2, each_epoch + 1):
        with tempfile.TemporaryDirectory() as own:
            folder = Path(all_gather_text(own, world)[0])
            run(folder, step, **KINDS[kind])
            again = run(folder, 0, **KINDS[kind])
            all_gather_text("done", world)  # rank 0's folder goes when all have read it
        differing.append([key for key in whole if not same_bits(whole[key], again[key])])
    return differing


@pytest.mark.parametrize(
    "kind", [*COMMON, *(pytest.param(kind, marks=pytest.mark.rare) for kind in RARE)]
)
def test_every_kind_of_training_goes_on_bit_for_bit(found: Found, kind: str) -> None:
    assert found(resumed, kind) == [[[], []]] * found.workers
