"""Random draws: equal ones in loader processes or epochs, and generators of the user's that a
library moves.

Kinds of fault: pytorch/pytorch#5059, xingyizhou/CenterNet#233,
Lightning-AI/pytorch-lightning#20412, AlbumentationsX#266
(equal draws in each loader process or epoch), Lightning-AI/pytorch-lightning#16166,
facebookresearch/detr#297 (equal draws on every rank). A stream that is read in the training's own
process shares generators with it, and must not depend on that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from allhands import DDP, SupervisedRunner
from tests.faults.probes import Found, probe, size
from tests.reference import Slope, mean_output
from tests.runner.problems import StopAt

pytestmark = pytest.mark.serial

SAMPLES = 12
EPOCHS = 2


class Noisy(Dataset[Any]):
    """Each sample is its index and a draw of torch, numpy and random, as augmentation makes
    them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(
            [float(index), float(torch.rand(())), np.random.rand(), random.random()],
            dtype=torch.float64,
        ), 0.0


class NoisyStream(IterableDataset[Any]):
    """The same samples, in an order that the stream draws for itself."""

    def __iter__(self) -> Iterator[Any]:
        return map(Noisy().__getitem__, torch.randperm(SAMPLES).tolist())


class Keeping(SupervisedRunner):
    """Keeps every sample that this rank trains on."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.seen: list[list[float]] = []

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        self.seen += batch[0].tolist()
        (
            torch.rand(()),
            np.random.rand(),
        )  # as a model with dropout draws, and a training that mixes samples
        return model(batch[0].float()), batch[1]


def read(loader_processes: int, dataset: Any = None) -> list[list[float]]:
    model, runner = Slope(), Keeping()
    runner.train(
        model=model,
        criterion=mean_output,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        num_epochs=EPOCHS,
        distributed=DDP(),
        datasets={
            "batch_size": 6 // size(),
            "num_workers": loader_processes,
            "train": dataset or Noisy(),
        },
    )
    return runner.seen


@probe
def draws() -> dict[str, Any]:
    return {
        "0": read(0),
        "0 again": read(0),
        "2": read(2),
        "2 again": read(2),
        "stream": read(0, NoisyStream()),
        "stream, loader process": read(1, NoisyStream()),
    }


def by_epoch(ranks: list[list[list[float]]]) -> list[list[tuple[float, ...]]]:
    """All ranks' samples of each epoch, by index."""
    epochs = []
    for epoch in range(EPOCHS):
        rows = [
            tuple(row)
            for rank in ranks
            for row in rank[epoch * len(rank) // EPOCHS : (epoch + 1) * len(rank) // EPOCHS]
        ]
        epochs.append(sorted(rows))
    return epochs


@pytest.mark.parametrize("processes", ["0", "2"])
def test_draws_differ_over_epochs_ranks_and_loader_processes(found: Found, processes: str) -> None:
    rows = [row for rank in found(draws) for row in rank[processes]]
    assert len(rows) == SAMPLES * EPOCHS
    for column in (1, 2, 3):
        assert len({row[column] for row in rows}) == SAMPLES * EPOCHS


@pytest.mark.parametrize("processes", ["0", "2"])
def test_draws_repeat_when_the_run_is_repeated(found: Found, processes: str) -> None:
    for rank in found(draws):
        assert rank[processes] == rank[f"{processes} again"]


EXPECTED: dict[str, Any] = {}


def test_a_sample_is_augmented_alike_at_any_number_of_workers_and_loader_processes(
    found: Found,
) -> None:
    here = [by_epoch([rank[processes] for rank in found(draws)]) for processes in ("0", "2")]
    assert here[0] == here[1]
    assert [[row[0] for row in epoch] for epoch in here[0]] == [
        list(map(float, range(SAMPLES)))
    ] * EPOCHS
    # The first world that runs sets what the others must give.
    assert EXPECTED.setdefault("draws", here[0]) == here[0]


def test_a_stream_draws_alike_at_any_number_of_workers_and_loader_processes(found: Found) -> None:
    here = [
        by_epoch([rank[kind] for rank in found(draws)])
        for kind in ("stream", "stream, loader process")
    ]
    assert here[0] == here[1]
    assert [[row[0] for row in epoch] for epoch in here[0]] == [
        list(map(float, range(SAMPLES)))
    ] * EPOCHS
    assert len({row[1] for epoch in here[0] for row in epoch}) == SAMPLES * EPOCHS
    assert EXPECTED.setdefault("stream", here[0]) == here[0]


@pytest.mark.parametrize("loader_processes", [0, 1])
def test_a_stream_that_shuffles_goes_on_where_it_was_interrupted(
    tmp_path: Path, loader_processes: int
) -> None:
    def trained(logdir: Path, stop_at: int = 0) -> list[list[float]]:
        model, runner = nn.Sequential(nn.Dropout(0.5), Slope()), Keeping()
        runner.train(
            model=model,
            criterion=mean_output,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            num_epochs=EPOCHS,
            distributed=False,
            callbacks=[StopAt(stop_at)],
            logdir=logdir,
            resume="auto",
            loaders={"train": DataLoader(NoisyStream(), 3, num_workers=loader_processes)},
        )
        return [*runner.seen, [float(model[1].w.detach())]]

    whole = trained(tmp_path / "whole")
    for step in (1, 3, 6):
        seen = trained(tmp_path / str(step), stop_at=step)[:-1]
        assert seen == whole[: 3 * step]
        assert trained(tmp_path / str(step)) == whole[3 * step :]


def generators() -> list[float]:
    return [
        float(torch.rand(())),
        float(np.random.rand()),
        float(np.random.randn()),
        random.random(),
        random.gauss(0, 1),
    ]


def seed_all() -> None:
    torch.default_generator.manual_seed(11)
    np.random.seed(11)
    random.seed(11)


@probe
def left_as_found() -> dict[str, list[float]]:
    """What the user's generators give after a call of each method, which itself draws much."""
    model, runner = nn.Sequential(nn.Dropout(0.5), Slope()), SupervisedRunner(device="cpu")

    def loader() -> DataLoader[Any]:
        return DataLoader([(torch.ones(2), 0.0)] * 6, 1, shuffle=True)

    methods: dict[str, Any] = {
        "train": lambda: runner.train(
            model=model,
            criterion=mean_output,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            num_epochs=2,
            loaders={"train": loader(), "valid": loader()},
            distributed=DDP(),
        ),
        "train on noise": lambda: read(0),
        "evaluate": lambda: runner.evaluate(
            model=model, criterion=mean_output, loaders={"valid": loader()}, distributed=DDP()
        ),
        "predict": lambda: runner.predict(model=model, loader=loader(), distributed=DDP()),
    }
    seed_all()
    found = {"untouched": generators()}
    for name, method in methods.items():
        seed_all()
        method()
        found[name] = generators()
    return found


def test_the_users_generators_are_left_as_they_were_found(found: Found) -> None:
    for rank in found(left_as_found):
        expected = rank.pop("untouched")
        assert rank == dict.fromkeys(("train", "train on noise", "evaluate", "predict"), expected)
