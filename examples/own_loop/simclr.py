"""SimCLR: images are told apart from all other images of the global batch.

python simclr.py
allhands launch -n 2 simclr.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import allhands
from allhands.data.catalogue import load


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(512, 64),
    )


def view(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Turned, stretched and moved as four numbers from 0 to 1 an image say."""
    angle, size, right, down = (draws - 0.5).t()
    cos, sin = (1 + 0.6 * size) * angle.cos(), (1 + 0.6 * size) * angle.sin()
    rows = torch.stack([cos, -sin, 0.5 * right, sin, cos, 0.5 * down], dim=1)
    grid = F.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def nt_xent(one: torch.Tensor, other: torch.Tensor, temperature: float = 0.2) -> torch.Tensor:
    """Which of all rows is the other view of the same image?"""
    rows = F.normalize(torch.cat([one, other]), dim=1)
    alike = (rows @ rows.t() / temperature).fill_diagonal_(-torch.inf)
    partners = torch.arange(len(rows), device=rows.device).roll(len(one))
    return F.cross_entropy(alike, partners)


def nearest(model: nn.Module, data, valid) -> float:
    """How often the nearest image of the training data is of the same class."""
    device = next(model.parameters()).device
    with torch.no_grad():
        known, asked = (F.normalize(model(d.tensors[0].to(device)), dim=1) for d in (data, valid))
    found = data.tensors[1][(asked @ known.t()).argmax(1).cpu()]
    return (found == valid.tensors[1]).float().mean().item()


def train(data, valid, batch_size=64, epochs=10, **options):
    """Train on images of 8 x 8 numbers. `batch_size` is that of one worker."""
    torch.manual_seed(0)
    model = build()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loaders={"train": DataLoader(data, batch_size=batch_size, shuffle=True)},
        **options,
    )

    def loss_of(batch):
        images = batch[0]
        one, other = (loop.model(view(images, loop.rand(len(images), 4))) for _ in range(2))
        return nt_xent(loop.gather(one), loop.gather(other))

    for epoch in loop.epochs(epochs):
        for batch in epoch.train:
            loop.step(loss_of, batch)
    loop.print(f"nearest image of the same class: {nearest(model, data, valid):.1%}")
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, help="use only the first so many images")
    parser.add_argument("--strategy")
    args = parser.parse_args()
    data, valid = (load("digits", part, limit=args.limit) for part in ("train", "valid"))
    train(data, valid, epochs=args.epochs, strategy=args.strategy)
