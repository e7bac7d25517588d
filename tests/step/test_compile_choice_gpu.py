"""Whether a training has its model compiled, measured on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner
from allhands.step import compile_choice
from tests.reference import relative_difference


class Waits(nn.Module):
    """A mask check that waits for the device, as transformers' has; compiled, it does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return x
        return x if bool((x < 1e9).all()) else -x


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [False, True])
def test_on_a_gpu_a_long_training_is_compiled(
    waits: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(compile_choice, "_COMPILES", (0.0, 0.0))
    monkeypatch.setattr(compile_choice, "_FASTER", 10.0)  # whatever this small model gives

    def train(step: str, **options: Any) -> nn.Module:
        torch.manual_seed(1)
        layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4)]
        model = nn.Sequential(*([Waits()] if waits else []), *layers)
        drawn = torch.Generator().manual_seed(0)
        rows = TensorDataset(
            torch.randn(800, 64, generator=drawn), torch.randint(4, (800,), generator=drawn)
        )
        SupervisedRunner(device="cuda").train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
            loaders={"train": DataLoader(rows, 8)},
            step=step,
            **{"num_epochs": 3} | options,
        )
        return model

    expected = train("eager")
    capsys.readouterr()
    found = train("auto", logdir=tmp_path / "whole")
    said = capsys.readouterr().out
    assert "so that torch.compile is tried" in said
    assert "step: compiled, " in said
    assert "step: captured in a CUDA graph" in said
    assert relative_difference(found.state_dict(), expected.state_dict()) < 1e-3
    train("auto", logdir=tmp_path / "parts", num_epochs=2)
    resumed = train("auto", logdir=tmp_path / "parts", resume="auto")
    assert all(
        torch.equal(a, b)
        for a, b in zip(found.state_dict().values(), resumed.state_dict().values(), strict=True)
    )
