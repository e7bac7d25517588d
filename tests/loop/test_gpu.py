"""`allhands.Loop` on GPUs: captured steps, and workers through nccl."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands


def train(step: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 8))
    d = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 4))
    loop = allhands.Loop(
        models={"g": g, "d": d},
        optimizers={
            "g": torch.optim.Adam(g.parameters(), lr=0.01),
            "d": torch.optim.Adam(d.parameters(), lr=0.01),
        },
        loaders={"train": DataLoader(data, batch_size=16, shuffle=True)},
        step=step,
    )

    def of_d(batch: Any) -> Any:
        real, z = batch
        fake = loop.models["d"](loop.models["g"](z).detach())
        loss = F.softplus(-loop.models["d"](real)).mean() + F.softplus(fake).mean()
        return {"loss": loss, "fake": fake.mean()}

    def of_g(batch: Any) -> torch.Tensor:
        return F.softplus(-loop.models["d"](loop.models["g"](batch[1]))).mean()

    for epoch in loop.epochs(4):
        for batch in epoch.train:
            loop.step(of_d, batch, optimizer="d")
            loop.step(of_g, batch, optimizer="g")
    captured = [
        group.captured is not None and group.captured.reason is None
        for group in loop.groups.values()
    ]
    assert captured == [step == "graph"] * 2
    return [p.detach().cpu() for model in (g, d) for p in model.parameters()], loop.history["train"]


@pytest.mark.gpu
def test_captured_steps_of_two_optimizers_are_the_eager_ones() -> None:
    eager, history = train("eager")
    captured, same = train("graph")
    for one, other in zip(captured, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for name, values in history.items():
        assert same[name] == pytest.approx(values, abs=1e-4)


@pytest.mark.gpu
def test_noise_is_not_captured() -> None:
    model = nn.Linear(4, 1)
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=16)},
        step="graph",
    )

    def loss_of(batch: Any) -> torch.Tensor:
        return loop.model(batch[0] + loop.randn(len(batch[0]), 4)).square().mean()

    with pytest.raises(allhands.UserError, match="cannot be captured"):
        for epoch in loop.epochs(2):
            for batch in epoch.train:
                loop.step(loss_of, batch)
