"""Milliseconds a step of `allhands.Loop` on a GPU, beside the runner and loops by hand.

    python benchmarks/own_loop.py

ResNet-18 at batch 64, and a GPT of 124M parameters at 16 x 1,024 tokens, by the runner and by an
own loop, all captured; a DCGAN with two optimizers at batch 64 and 16 x 16 images by hand, and by
an own loop, eager and captured. Contenders take turns; a figure is the median of the epochs after
the first, in which steps are captured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from report import machine, save_json, summarize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands.models import GPT, NextToken, ResNet18

BATCH, STEPS, EPOCHS = 64, 60, 6


class Clock(allhands.Callback):
    """Milliseconds a step, by epoch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start(self) -> None:
        torch.cuda.synchronize()
        self.began = time.perf_counter()

    def stop(self) -> None:
        torch.cuda.synchronize()
        self.times.append((time.perf_counter() - self.began) / STEPS * 1000)

    def on_epoch_start(self, training: Any) -> None:
        self.start()

    def on_epoch_end(self, training: Any) -> None:
        self.stop()


def images() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, DataLoader]]:
    torch.manual_seed(0)
    model = ResNet18()
    x, y = torch.randn(BATCH * STEPS, 3, 32, 32), torch.randint(0, 10, (BATCH * STEPS,))
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {"train": loader}


def by_the_runner(clock: Clock) -> None:
    model, optimizer, loaders = images()
    allhands.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        loaders=loaders,
        num_epochs=EPOCHS,
        callbacks=[clock],
    )


def by_an_own_loop(clock: Clock) -> None:
    model, optimizer, loaders = images()
    loop = allhands.Loop(model=model, optimizer=optimizer, loaders=loaders, step="graph")

    def loss_of(batch: Any) -> torch.Tensor:
        return F.cross_entropy(loop.model(batch[0]), batch[1])

    for epoch in loop.epochs(EPOCHS):
        clock.start()
        for batch in epoch.train:
            loop.step(loss_of, batch)
        clock.stop()


def tokens() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, DataLoader]]:
    torch.manual_seed(0)
    model = GPT(50_304, 1024, layers=12, heads=12, width=768)
    data = torch.randint(0, 50_257, (16 * STEPS, 1025))
    loader = DataLoader(TensorDataset(data[:, :-1], data[:, 1:]), batch_size=16, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), {"train": loader}


def gpt_by_the_runner(clock: Clock) -> None:
    model, optimizer, loaders = tokens()
    allhands.SupervisedRunner().train(
        model=model,
        criterion=NextToken(),
        optimizer=optimizer,
        loaders=loaders,
        num_epochs=4,
        precision="bf16",
        callbacks=[clock],
    )


def gpt_by_an_own_loop(clock: Clock) -> None:
    model, optimizer, loaders = tokens()
    loop = allhands.Loop(
        model=model, optimizer=optimizer, loaders=loaders, precision="bf16", step="graph"
    )
    next_token = NextToken()

    def loss_of(batch: Any) -> torch.Tensor:
        return next_token(loop.model(batch[0]), batch[1])

    for epoch in loop.epochs(4):
        clock.start()
        for batch in epoch.train:
            loop.step(loss_of, batch)
        clock.stop()


def gan() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer], TensorDataset]:
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Unflatten(1, (256, 1, 1)),
        nn.ConvTranspose2d(256, 128, 4, 1, 0),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 1, 4, 2, 1),
        nn.Tanh(),
    )
    critic = nn.Sequential(
        nn.Conv2d(1, 64, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 128, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(128, 1, 4, 1, 0),
        nn.Flatten(),
    )
    models: dict[str, nn.Module] = {"g": generator, "d": critic}
    optimizers: dict[str, torch.optim.Optimizer] = {
        name: torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))
        for name, model in models.items()
    }
    samples = BATCH * STEPS
    return (
        models,
        optimizers,
        TensorDataset(torch.randn(samples, 1, 16, 16), torch.randn(samples, 64)),
    )


def d_loss(g: nn.Module, d: nn.Module, real: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return F.softplus(-d(real)).mean() + F.softplus(d(g(z).detach())).mean()


def g_loss(g: nn.Module, d: nn.Module, z: torch.Tensor) -> torch.Tensor:
    return F.softplus(-d(g(z))).mean()


def gan_by_hand(clock: Clock) -> None:
    models, optimizers, data = gan()
    g, d = (models[name].cuda() for name in ("g", "d"))
    for _ in range(EPOCHS):
        clock.start()
        for batch in DataLoader(data, batch_size=BATCH, shuffle=True, pin_memory=True):
            real, z = (part.cuda(non_blocking=True) for part in batch)
            optimizers["d"].zero_grad()
            d_loss(g, d, real, z).backward()
            optimizers["d"].step()
            optimizers["g"].zero_grad()
            g_loss(g, d, z).backward()
            optimizers["g"].step()
        clock.stop()


def gan_by_an_own_loop(clock: Clock, step: str) -> None:
    models, optimizers, data = gan()
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    loop = allhands.Loop(models=models, optimizers=optimizers, loaders={"train": loader}, step=step)

    def of_d(batch: Any) -> torch.Tensor:
        return d_loss(loop.models["g"], loop.models["d"], batch[0], batch[1])

    def of_g(batch: Any) -> torch.Tensor:
        return g_loss(loop.models["g"], loop.models["d"], batch[1])

    for epoch in loop.epochs(EPOCHS):
        clock.start()
        for batch in epoch.train:
            loop.step(of_d, batch, optimizer="d")
            loop.step(of_g, batch, optimizer="g")
        clock.stop()


CONTENDERS: dict[str, dict[str, Callable[[Clock], None]]] = {
    "resnet-18": {"runner": by_the_runner, "own loop": by_an_own_loop},
    "gpt-124m, 16 x 1024, bf16": {"runner": gpt_by_the_runner, "own loop": gpt_by_an_own_loop},
    "dcgan": {
        "by hand": gan_by_hand,
        "own loop, eager": lambda clock: gan_by_an_own_loop(clock, "eager"),
        "own loop, captured": lambda clock: gan_by_an_own_loop(clock, "graph"),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    result: dict[str, Any] = {"unit": "ms a step", "machine": machine()}
    for task, contenders in CONTENDERS.items():
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(given.runs):
            for name, train in contenders.items():
                clock = Clock()
                train(clock)
                samples[name].append(statistics.median(clock.times[1:]))
        result[task] = summarize(samples, next(iter(contenders)))
    save_json("own_loop_h200", result)


if __name__ == "__main__":
    main()
