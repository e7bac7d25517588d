"""Small trainings that verify's tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import SupervisedRunner
from allhands.verify import Report


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))


def data(samples: int = 53, ignored: int = 0) -> TensorDataset:
    """Four classes that can be told apart; the targets of the first `ignored` samples do not
    count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 5, generator=generator)
    y = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    y[:ignored] = -100
    return TensorDataset(x, y)


def arguments(**changes: Any) -> dict[str, Any]:
    """Arguments of `verify` for a small classification on CPU cores, with changes."""
    model = changes.get("model") or network()
    given = {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.2),
        "loaders": {"train": DataLoader(data(), 6, shuffle=True)},
        "runner": SupervisedRunner(device="cpu"),
        "workers": 2,
        "steps": 6,
    }
    return given | changes


def verified(**changes: Any) -> Report:
    """The report of a small training with changes."""
    return allhands.verify(**arguments(**changes))


def only(report: Report) -> Any:
    """The report's one row."""
    (row,) = report.rows
    return row
