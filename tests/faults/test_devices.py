"""Checkpoints that every rank loads onto the first card. Kind of fault: NVIDIA/apex#222,
Lightning-AI/pytorch-lightning#19219."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import allhands
from tests.runner.problems import fit


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    members = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return [tensor for member in members for tensor in tensors_in(member)]


def test_a_checkpoint_is_read_onto_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each rank then moves it; a checkpoint of card 0 would otherwise be read onto card 0 by
    every rank."""
    model, _ = fit(logdir=tmp_path)
    asked: list[Any] = []
    original = torch.load

    def load(*args: Any, **options: Any) -> Any:
        asked.append(options.get("map_location"))
        return original(*args, **options)

    monkeypatch.setattr(torch, "load", load)
    state = allhands.load_checkpoint(tmp_path)
    assert asked
    assert set(map(str, asked)) == {"cpu"}
    found = tensors_in(state)
    assert len(found) > len(model.state_dict())  # the optimizer's are among them
    assert {tensor.device.type for tensor in found} == {"cpu"}
    for name, value in model.state_dict().items():
        assert torch.equal(state["model"][name], value)
