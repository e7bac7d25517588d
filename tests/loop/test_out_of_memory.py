"""A GPU without room ends a training with what would take less."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import allhands
from allhands import DDP, SupervisedRunner
from allhands.loop import out_of_memory
from tests.worlds import in_world

ROWS = TensorDataset(torch.ones(24, 3), torch.ones(24, 1))


class Full(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def note_of(**options: Any) -> str:
    model = Full(3, 1)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            datasets={
                "batch_size": 6,
                "train": TensorDataset(torch.ones(24, 3), torch.ones(24, 1)),
            },
            num_epochs=1,
            **options,
        )
    (note,) = raised.value.__notes__
    return note


def test_the_changes_are_those_that_were_not_made_yet() -> None:
    note = note_of()
    assert "with single on one worker, micro-batches of 6 samples" in note
    assert "batches of 3 samples with accumulate=2" in note
    assert "activation_checkpointing=True" in note
    assert "distributed='fsdp' on several GPUs" in note
    assert "accumulate=4" in note_of(accumulate=2)


class FullOfData(nn.Module):
    """Runs out of memory with data, and not in a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            *(nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.Linear(300, 3)) for _ in range(4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.parts(x)


def planned_note(samples: int = 64, **options: Any) -> str:
    model = FullOfData()
    rows = TensorDataset(torch.ones(2 * samples, 3), torch.ones(2 * samples, 3))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.AdamW(model.parameters()),
            datasets={"batch_size": samples, "train": rows},
            num_epochs=1,
            **options,
        )
    (note,) = raised.value.__notes__
    return note


def taken(samples: int = 64, gpus: int = 1) -> dict[str, int]:
    model = FullOfData()
    batch = torch.ones(samples, 3)
    found = allhands.plan(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.AdamW(model.parameters()),
        batch=(batch, batch),
        gpus=gpus,
        memory=1,
    )
    return {row.name: row.peak for row in found.rows}


def test_on_one_gpu_the_changes_are_those_that_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = taken()
    room = {"bytes": peaks["single"] - 1}
    monkeypatch.setattr(out_of_memory, "_room", lambda world: room["bytes"])
    note = planned_note()
    assert "What would fit" in note
    assert "batches of 32 samples with accumulate=2, which are the same steps (" in note
    assert "activation_checkpointing=True, which computes layers twice (" in note

    # Of what is planned, only what fits is told.
    room["bytes"] = taken(32)["single"]
    tight = planned_note()
    assert peaks["single recompute"] > room["bytes"] or "activation_checkpointing" in tight
    assert "batches of 32" in tight


def fitting_changes_module() -> ModuleType:
    """The function of its name hides it in the package."""
    return importlib.import_module("allhands.planning.fitting_changes")


def test_where_no_plan_helps_the_changes_are_told_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (10**15, 1):  # it would fit, so that something else takes the room; nothing fits
        monkeypatch.setattr(out_of_memory, "_room", lambda world, size=size: size)
        note = planned_note()
        assert "What takes less, the cheapest first: batches of 32 samples" in note
    monkeypatch.setattr(fitting_changes_module(), "_PATIENCE_S", -1.0)
    assert "What takes less" in planned_note()


def test_with_several_workers() -> None:
    for note in in_world(2, note_of):
        assert "with ddp on 2 workers" in note
        assert "DDP(optimizer_state='sharded')" in note
        assert "allhands plan" in note


def planned_in_a_world(room: float) -> str:
    with mock.patch.object(out_of_memory, "_room", return_value=room):
        return planned_note()


def test_with_several_workers_the_changes_are_those_that_would_fit() -> None:
    room = max(size for name, size in taken(gpus=2).items() if name == "ddp") - 1
    for note in in_world(2, planned_in_a_world, room):
        assert "with ddp on 2 workers" in note
        assert "What would fit" in note
        assert "batches of 32 samples with accumulate=2, which are the same steps (" in note


def sharded() -> str:
    return note_of(distributed=DDP(optimizer_state="sharded"), precision="bf16")


def test_what_is_on_is_not_proposed() -> None:
    for note in in_world(2, sharded):
        assert "DDP(optimizer_state='sharded')" not in note
        assert "precision" not in note
        assert "distributed='fsdp'" in note
