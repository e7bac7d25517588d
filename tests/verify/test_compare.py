"""`allhands.verify` itself: how it is reached, what it refuses, and runs of special kinds."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import allhands
from allhands.errors import UserError
from allhands.verify import compare
from allhands.verify.runs import bytes_of
from tests.verify.problems import arguments, data, network, verified


@pytest.mark.parametrize(
    "code",
    [
        "import allhands; f = allhands.verify; import allhands.verify; g = allhands.verify",
        "import allhands.verify; import allhands; f = g = allhands.verify",
        "from allhands import verify as f; import allhands.verify.report; import allhands; g = "
        "allhands.verify",
        "import allhands.verify.noise as n; from allhands import verify as f; import allhands; g = "
        "allhands.verify",
    ],
)
def test_the_name_can_be_called_whatever_was_imported_first(code: str) -> None:
    check = (
        "\nfor h in (f, g):\n    try:\n        h(model=None, steps=0)\n    except ValueError as "
        "error:\n        print(error)"
        "\nfrom allhands.verify import Report"
    )
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True)
    assert (
        done.stdout.splitlines()
        == ["steps=0; it must be a whole number of optimizer steps, at least 1"] * 2
    ), done.stderr


def test_the_signature_is_the_functions() -> None:
    assert list(inspect.signature(allhands.verify).parameters) == list(
        inspect.signature(compare.verify).parameters
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategies": "dpp"}, "there is no strategy 'dpp'"),
        ({"strategies": allhands.DDP}, r"strategies holds the class DDP; write DDP\(\)"),
        ({"strategies": [allhands.DDP]}, r"strategies holds the class DDP; write DDP\(\)"),
        ({"strategies": ()}, "strategies is empty"),
        ({"workers": 0}, "workers holds 0; each must be a whole number"),
        ({"workers": []}, "workers is empty"),
        ({"steps": 1.5}, "steps=1.5; it must be a whole number"),
        ({"runner": 3}, "runner is a int; pass a SupervisedRunner"),
        ({"clip_norm": -1}, "clip_norm=-1"),
        ({"criterion": None}, "criterion is None"),
        ({"loaders": None}, "pass either loaders= or datasets=; neither was given"),
        ({"loaders": {"valid": DataLoader(data(), 4)}}, "no loader's name begins with 'train'"),
        ({"strategies": "single"}, "workers=2 with distributed='single', which is one process"),
        (
            {"loaders": {"train": DataLoader(data(5), 6, drop_last=True)}},
            "no optimizer step|there was no batch to train on",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        verified(**changes)


def test_a_world_that_was_started_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "world_around", lambda: 2)
    with pytest.raises(UserError, match="this process is one of a world of 2 already"):
        verified()


def test_fewer_steps_are_compared_when_they_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    size = bytes_of(network())
    assert size == sum(p.numel() * 4 for p in network().parameters())
    monkeypatch.setattr(compare, "MEMORY", 6 * size)
    assert compare.steps_that_fit(size, 3) == (3, [])
    steps, (note,) = compare.steps_that_fit(size, 9)
    assert steps == 3
    assert note.startswith("3 steps were compared and not 9")
    monkeypatch.setattr(compare, "MEMORY", 2 * size - 1)
    with pytest.raises(UserError, match="fewer layers or a smaller width"):
        compare.steps_that_fit(size, 1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([data()[index] for index in range(53)])


class Augmented(Dataset[Any]):
    """Noise on every sample, from numpy's global generator."""

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> Any:
        x, y = data()[index]
        return x + torch.from_numpy(np.random.normal(0, 0.1, 5)).float(), y


class Fives(BatchSampler):
    """A batch sampler of the user's own, whose batches are kept whole."""


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_the_callers_objects_and_generators_are_left_alone() -> None:
    given = arguments(workers=1, strategies=["single", "ddp"], steps=2)
    before = {name: p.detach().clone() for name, p in given["model"].named_parameters()}
    state = torch.get_rng_state()
    report = allhands.verify(**given)
    assert [(row.strategy, row.verdict, row.difference) for row in report.rows] == [
        ("single", "same", 0),
        ("ddp", "same", 0),
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], p) for name, p in given["model"].named_parameters())
    assert not given["optimizer"].state
    assert not given["optimizer"]._optimizer_step_pre_hooks


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("kind", ["batch sampler", "stream", "bf16", "plateau", "augmentation"])
def test_trainings_of_special_kinds_are_the_same(kind: str) -> None:
    changes: dict[str, Any] = {}
    if kind == "batch sampler":
        changes["loaders"] = {
            "train": DataLoader(data(), batch_sampler=Fives(SequentialSampler(range(53)), 5, False))
        }
    if kind == "stream":
        changes["loaders"] = {"train": DataLoader(Stream(), 6)}
    if kind == "bf16":
        changes["precision"] = "bf16"
    if kind == "augmentation":
        changes["loaders"] = {"train": DataLoader(Augmented(), 6, shuffle=True)}
    if kind == "plateau":
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        loaders = {"train": DataLoader(data(), 9), "valid": DataLoader(data(), 9)}
        changes |= {
            "model": model,
            "optimizer": optimizer,
            "scheduler": plateau,
            "loaders": loaders,
            "steps": 8,
        }
    report = verified(criterion=nn.CrossEntropyLoss(), **changes)
    assert report.ok, report.table()
    assert report.rows[0].workers == 2
