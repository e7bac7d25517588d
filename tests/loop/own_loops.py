"""What tests of `allhands.Loop` train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands.data import derive_seed
from allhands.data.order import global_order

# The last global batch has 5 samples: with three workers one of them has one.
SAMPLES, GLOBAL = 53, 12


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=generator))


def net(inputs: int = 6, outputs: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def loaders(workers: int, accumulate: int = 1) -> dict[str, Any]:
    size = GLOBAL // workers // accumulate
    return {
        "train": DataLoader(data(), batch_size=size, shuffle=True),
        "valid": DataLoader(data(), batch_size=7),
    }


def batches_by_hand(epochs: int, seed: int = 42) -> Any:
    x, y = data().tensors
    for epoch in range(epochs):
        for part in global_order(SAMPLES, seed, epoch).split(GLOBAL):
            yield x[part], y[part]


def weights(*models: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def classifier_by_hand(clip: float | None = None) -> tuple[list[torch.Tensor], list[float]]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for x, y in batches_by_hand(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()) * len(x))
    return weights(model), losses


def noise(iteration: int, step: int, rows: int) -> torch.Tensor:
    """What `Loop.randn` draws first in a step function, for a whole batch."""
    seed = derive_seed(42, "draw", iteration, step, 1)
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def d_loss(d: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    return F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()


def contrast(rows: torch.Tensor) -> torch.Tensor:
    return (rows @ rows.t()).logsumexp(1).mean()


# For the models that `net` makes.
SLICES = allhands.Tensor(plan={"0": "colwise", "2": "rowwise"})


def gan_loop(shares: int, **options: Any) -> tuple[allhands.Loop, nn.Module, nn.Module]:
    """The loop of a generator and a discriminator, and these."""
    g, d = net(4, 6), net(6, 1, seed=1)
    loop = allhands.Loop(
        models={"g": g, "d": d},
        optimizers={
            "g": torch.optim.Adam(g.parameters(), lr=0.01),
            "d": torch.optim.SGD(d.parameters(), lr=0.1),
        },
        loaders={"train": loaders(shares)["train"]},
        **options,
    )
    return loop, g, d


class Left(Exception):
    pass


def small(**given: Any) -> tuple[allhands.Loop, nn.Module]:
    model = net()
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **given}
    return allhands.Loop(model=model, loaders=loaders(1), **given), model


def run(loop: allhands.Loop, body: Callable[[Any], None]) -> None:
    for epoch in loop.epochs(1):
        for batch in epoch.train:
            body(batch)
