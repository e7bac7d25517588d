"""A GPU without room ends a training with what would take less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from allhands import DDP, SupervisedRunner
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


def test_with_several_workers() -> None:
    for note in in_world(2, note_of):
        assert "with ddp on 2 workers" in note
        assert "DDP(optimizer_state='sharded')" in note
        assert "allhands plan" in note


def sharded() -> str:
    return note_of(distributed=DDP(optimizer_state="sharded"), precision="bf16")


def test_what_is_on_is_not_proposed() -> None:
    for note in in_world(2, sharded):
        assert "DDP(optimizer_state='sharded')" not in note
        assert "precision" not in note
        assert "distributed='fsdp'" in note
