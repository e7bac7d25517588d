"""A small classification for tasks of Slurm: by the runner, and by a loop of one's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Loop


def own_loop(batch_size: int) -> list[float]:
    """Some weights after seven steps of one's own, over two passes through the data."""
    own = given(batch_size)
    model, criterion = own["model"], own["criterion"]
    loop = Loop(
        model=model,
        optimizer=own["optimizer"],
        loaders={"train": own["loaders"]["train"]},
        device="cpu",
    )

    def loss_of(batch: Any) -> torch.Tensor:
        x, y = batch
        return criterion(loop.model(x), y)

    for step in loop.steps(7):
        loop.step(loss_of, step.batch)
    return model[0].weight[0].tolist()


def given(batch_size: int, dropout: float = 0.0) -> dict[str, Any]:
    """Arguments of `train` for a small classification."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(53, 5, generator=generator)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))
    return {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.02),
        "loaders": {
            "train": DataLoader(data, batch_size, shuffle=True),
            "valid": DataLoader(data, batch_size),
        },
        "num_epochs": 2,
    }
