"""SAM: each step takes the gradient at the worst point nearby, which needs the loss twice.

python sam.py
allhands launch -n 2 sam.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import allhands
from allhands.data.catalogue import load


class SAM(torch.optim.SGD):
    """SGD with the gradient at a distance of `rho` along the gradient.

    An optimizer whose ``step`` must have a closure is called with the gradient of the global batch
    in place. The closure computes it anew.
    """

    def __init__(self, parameters, rho=0.05, **options):
        super().__init__(parameters, **options)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure):
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        before = [p.clone() for p in parameters]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.add_(p.grad, alpha=self.rho / (norm.item() + 1e-12))
        loss = closure()
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
        super().step()
        return loss


def build() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(data, valid, batch_size=32, epochs=15, **options):
    """Train a classifier. `batch_size` is that of one worker."""
    torch.manual_seed(0)
    model = build()
    loop = allhands.Loop(
        model=model,
        optimizer=SAM(model.parameters(), lr=0.1, momentum=0.9),
        loaders={
            "train": DataLoader(data, batch_size=batch_size, shuffle=True),
            "valid": DataLoader(valid, batch_size=batch_size),
        },
        **options,
    )

    def loss_of(batch):
        images, labels = batch
        output = loop.model(images)
        accuracy = (output.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(output, labels), "accuracy": accuracy}

    for epoch in loop.epochs(epochs):
        for batch in epoch.train:
            loop.step(loss_of, batch)
        epoch.evaluate("valid", loss_of)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--limit", type=int, help="use only the first so many images")
    parser.add_argument("--strategy")
    args = parser.parse_args()
    data, valid = (load("digits", part, limit=args.limit) for part in ("train", "valid"))
    train(data, valid, epochs=args.epochs, strategy=args.strategy)
