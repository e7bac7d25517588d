"""Small trainings that the runner's tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Callback, SupervisedRunner


def classification(samples: int = 53, seed: int = 0) -> TensorDataset:
    """Four classes that can be told apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long())


def classifier(dropout: float = 0.0) -> nn.Module:
    torch.default_generator.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))


def arguments(**changes: Any) -> dict[str, Any]:
    """Arguments of `train` for a small classification, with changes."""
    model = changes.get("model") or classifier(changes.pop("dropout", 0.0))
    data = classification()
    given = {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": changes["optimizer"]
        if "optimizer" in changes
        else torch.optim.Adam(model.parameters(), lr=0.02),
        "loaders": {"train": DataLoader(data, 8, shuffle=True), "valid": DataLoader(data, 8)},
        "metrics": ["accuracy"],
        "num_epochs": 3,
    }
    return given | changes


def fit(**changes: Any) -> tuple[nn.Module, Any]:
    """Train on the CPU; the model and the history."""
    given = arguments(**changes)
    history = SupervisedRunner(device="cpu").train(**given)
    return given["model"], history


class StopAt(Callback):
    """Ends the training after an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, training: Any) -> None:
        if training.step == self.step:
            training.stop("enough", now=True)
