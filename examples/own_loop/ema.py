"""A moving average of the weights is swapped in for evaluation.

python ema.py
allhands launch -n 2 ema.py
"""

import argparse
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import allhands
from allhands.data.catalogue import load


class Average:
    """A moving average of the parameters of ``loop.model``: of what this rank has of them."""

    def __init__(self, parameters, decay):
        own = [p.detach() for p in parameters]
        self.parameters = [p.to_local() if isinstance(p, DTensor) else p for p in own]
        self.values, self.decay = [p.clone() for p in self.parameters], decay

    def update(self):
        for value, p in zip(self.values, self.parameters, strict=True):
            value.lerp_(p, 1 - self.decay)

    @contextmanager
    def swapped_in(self):
        weights = [p.clone() for p in self.parameters]
        self.copy_(self.values)
        yield
        self.copy_(weights)

    def copy_(self, values):
        for p, value in zip(self.parameters, values, strict=True):
            p.copy_(value)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def build() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(data, valid, batch_size=32, epochs=15, decay=0.95, **options):
    """Train a classifier. `batch_size` is that of one worker."""
    torch.manual_seed(0)
    model = build()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loaders={
            "train": DataLoader(data, batch_size=batch_size, shuffle=True),
            "valid": DataLoader(valid, batch_size=batch_size),
        },
        **options,
    )

    average = Average(loop.model.parameters(), decay)
    loop.register("average", average, each_rank=True)

    def loss_of(batch):
        images, labels = batch
        output = loop.model(images)
        accuracy = (output.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(output, labels), "accuracy": accuracy}

    for epoch in loop.epochs(epochs):
        for batch in epoch.train:
            loop.step(loss_of, batch)
            average.update()
        with epoch.evaluating("valid") as evaluation, average.swapped_in():
            evaluation.of(loss_of)
    return model, loop.history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--limit", type=int, help="use only the first so many images")
    parser.add_argument("--strategy")
    args = parser.parse_args()
    data, valid = (load("digits", part, limit=args.limit) for part in ("train", "valid"))
    train(data, valid, epochs=args.epochs, strategy=args.strategy)
