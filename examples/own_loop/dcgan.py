"""A DCGAN: two models, each with an optimizer of its own.

python dcgan.py
allhands launch -n 2 dcgan.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import allhands
from allhands.data.catalogue import load

Z = 32  # numbers of noise an image


def build() -> tuple[nn.Module, nn.Module]:
    # GroupNorm sees one image. BatchNorm would see the images of one worker, which makes another
    # training of each number of workers.
    generator = nn.Sequential(
        nn.Unflatten(1, (Z, 1, 1)),
        nn.ConvTranspose2d(Z, 64, 4, bias=False),
        nn.GroupNorm(4, 64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, bias=False),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64, 1),
    )
    return generator, discriminator


def train(data, batch_size=32, epochs=30, **options):
    """Train on images of 8 x 8 numbers from 0 to 1. `batch_size` is that of one worker."""
    torch.manual_seed(0)
    generator, discriminator = build()
    loop = allhands.Loop(
        models={"g": generator, "d": discriminator},
        optimizers={
            "g": torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            "d": torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        },
        loaders={"train": DataLoader(data, batch_size=batch_size, shuffle=True)},
        **options,
    )
    g, d = loop.models["g"], loop.models["d"]

    def d_loss(batch):
        real = 2 * batch[0] - 1
        fake = g(loop.randn(len(real), Z)).detach()
        return F.softplus(-d(real)).mean() + F.softplus(d(fake)).mean()

    def g_loss(batch):
        return F.softplus(-d(g(loop.randn(len(batch[0]), Z)))).mean()

    for epoch in loop.epochs(epochs):
        for batch in epoch.train:
            loop.step(d_loss, batch, optimizer="d")
            loop.step(g_loss, batch, optimizer="g")
    return generator, discriminator


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--limit", type=int, help="use only the first so many images")
    parser.add_argument("--strategy")
    args = parser.parse_args()
    train(load("digits", limit=args.limit), epochs=args.epochs, strategy=args.strategy)
