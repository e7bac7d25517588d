"""Knowledge distillation: a small student learns what a frozen teacher says.

python distillation.py
allhands launch -n 2 distillation.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import allhands
from allhands.data.catalogue import load


def build(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10)
    )


def teach(data, batch_size=32, epochs=15):
    """A teacher that knows the images."""
    torch.manual_seed(0)
    teacher = build(256)
    loop = allhands.Loop(
        model=teacher,
        optimizer=torch.optim.Adam(teacher.parameters(), lr=1e-3),
        loaders={"train": DataLoader(data, batch_size=batch_size, shuffle=True)},
    )
    for epoch in loop.epochs(epochs):
        for batch in epoch.train:
            loop.step(lambda batch: F.cross_entropy(loop.model(batch[0]), batch[1]), batch)
    return teacher


def train(data, valid, teacher, batch_size=32, epochs=15, temperature=3.0, **options):
    """Train a student. `batch_size` is that of one worker."""
    torch.manual_seed(1)
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    loop = allhands.Loop(
        models={"student": student, "teacher": teacher.eval()},
        optimizers={"student": torch.optim.Adam(student.parameters(), lr=3e-3)},
        loaders={
            "train": DataLoader(data, batch_size=batch_size, shuffle=True),
            "valid": DataLoader(valid, batch_size=batch_size),
        },
        **options,
    )

    def loss_of(batch):
        images, labels = batch
        output = loop.models["student"](images)
        with torch.no_grad():
            target = F.softmax(loop.models["teacher"](images) / temperature, dim=1)
        said = F.log_softmax(output / temperature, dim=1)
        soft = F.kl_div(said, target, reduction="batchmean") * temperature**2
        return {
            "loss": 0.7 * soft + 0.3 * F.cross_entropy(output, labels),
            "accuracy": (output.argmax(1) == labels).float().mean(),
        }

    for epoch in loop.epochs(epochs):
        for batch in epoch.train:
            loop.step(loss_of, batch)
        epoch.evaluate("valid", loss_of)
    return student


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--limit", type=int, help="use only the first so many images")
    parser.add_argument("--strategy")
    args = parser.parse_args()
    data, valid = (load("digits", part, limit=args.limit) for part in ("train", "valid"))
    teacher = teach(data, epochs=args.epochs)
    train(data, valid, teacher, epochs=args.epochs, strategy=args.strategy)
