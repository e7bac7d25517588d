"""A moving average of the weights is evaluated in their place.

python ema.py
allhands launch -n 2 ema.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import allhands
from allhands.data.catalogue import load


def build() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(data, valid, batch_size=32, epochs=15, decay=0.95, **options):
    """Train a classifier. `batch_size` is that of one worker."""
    torch.manual_seed(0)
    model = build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    loop = allhands.Loop(
        models={"model": model, "average": average},  # so that both are in checkpoints
        optimizers={"model": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)},
        loaders={
            "train": DataLoader(data, batch_size=batch_size, shuffle=True),
            "valid": DataLoader(valid, batch_size=batch_size),
        },
        **options,
    )

    def loss_of(batch):
        return F.cross_entropy(loop.models["model"](batch[0]), batch[1])

    def loss_of_average(batch):
        images, labels = batch
        output = loop.models["average"](images)
        accuracy = (output.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(output, labels), "accuracy": accuracy}

    for epoch in loop.epochs(epochs):
        for batch in epoch.train:
            loop.step(loss_of, batch)
            average.update_parameters(model)
        epoch.evaluate("valid", loss_of_average)
    return model, average, loop.history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--limit", type=int, help="use only the first so many images")
    parser.add_argument("--strategy")
    args = parser.parse_args()
    data, valid = (load("digits", part, limit=args.limit) for part in ("train", "valid"))
    train(data, valid, epochs=args.epochs, strategy=args.strategy)
