"""WGAN-GP: the critic's loss holds the norm of its own gradient.

python wgan_gp.py
allhands launch -n 2 wgan_gp.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import allhands
from allhands.data.catalogue import load

Z = 32  # numbers of noise an image


def build() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(nn.Linear(Z, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 1))
    return generator, critic


def train(data, batch_size=32, steps=1000, every=5, penalty=10.0, **options):
    """Train on images of 8 x 8 numbers from 0 to 1. `batch_size` is that of one worker, `every` the
    steps of the critic to one of the generator."""
    torch.manual_seed(0)
    generator, critic = build()
    loop = allhands.Loop(
        models={"generator": generator, "critic": critic},
        optimizers={
            "generator": torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9)),
            "critic": torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9)),
        },
        loaders={"train": DataLoader(data, batch_size=batch_size, shuffle=True)},
        **options,
    )
    generate, judge = loop.models["generator"], loop.models["critic"]

    def critic_loss(batch):
        real = batch[0].flatten(1)
        fake = generate(loop.randn(len(real), Z)).detach()
        mix = loop.rand(len(real), 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        distance = judge(real).mean() - judge(fake).mean()
        steepness = (slope.norm(dim=1) - 1).square().mean()
        return {"loss": penalty * steepness - distance, "distance": distance}

    def generator_loss(batch):
        return -judge(generate(loop.randn(len(batch[0]), Z))).mean()

    for step in loop.steps(steps):
        loop.step(critic_loss, step.batch, optimizer="critic")
        if step.every(every):
            loop.step(generator_loss, step.batch, optimizer="generator")
        if step.every(100):
            step.log(**step.train())
    return generator, critic


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--limit", type=int, help="use only the first so many images")
    parser.add_argument("--strategy")
    args = parser.parse_args()
    train(load("digits", limit=args.limit), steps=args.steps, strategy=args.strategy)
