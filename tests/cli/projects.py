"""A small project of run files for tests of the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allhands.cli.main import run

SAMPLES = """
import torch
from torch.utils.data import TensorDataset


def load(samples: int = 40, fails: bool = False):
    if fails:
        raise ValueError("these data are bad")
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=drawn)
    y = x[:, :3].argmax(1)
    return {"train": TensorDataset(x, y), "valid": TensorDataset(x[:10], y[:10])}
"""
RUN = """
data: {name: "samples.py:load", batch_size: 8}
model: {name: mlp, in_features: 6, out_features: 3}
optimizer: {name: sgd, lr: 0.1}
num_epochs: 3
strategy: single
device: cpu
main_metric: accuracy
logdir: logs/first
"""


def write(folder: Path) -> None:
    """The run file and what it names."""
    (folder / "samples.py").write_text(SAMPLES)
    (folder / "run.yml").write_text(RUN)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a command prints; on the error output where it fails."""
    capsys.readouterr()
    assert run(list(words)) == code
    found = capsys.readouterr()
    return found.err if code == 2 else found.out


def json_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(said(capsys, *words))
