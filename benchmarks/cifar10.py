"""CIFAR-10 by ResNet-18 under ddp on all GPUs of this machine: epochs and seconds to 94 % of the
test images.

    python benchmarks/cifar10.py --root FOLDER            # where the data set lies
    python benchmarks/cifar10.py --root FOLDER --device cpu --epochs 1 --limit 512 --width 8

bf16, 256 images a GPU, random crops and flips on the GPU, SGD with Nesterov momentum, one cycle of
the learning rate, smoothed labels. The mean and deviation of the channels belong to the model.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from report import machine, save_json
from torch import nn

import allhands
from allhands.data import catalogue
from allhands.launch import spawn
from allhands.models import ResNet18
from allhands.models.augment import RandomCrop, RandomFlip

AIM = 0.94
BATCH = 256  # of a worker


class Normalized(nn.Module):
    """Pixels of 0 to 255 (N x 3 x 32 x 32) as the network takes them."""

    def __init__(self) -> None:
        super().__init__()
        entry = catalogue.info("cifar10")
        for name, values in (("mean", entry.mean), ("std", entry.std)):
            self.register_buffer(name, 255 * torch.tensor(values).view(1, 3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return ((images.float() - self.mean) / self.std).contiguous(
            memory_format=torch.channels_last
        )


def train(root: str | None, device: str, epochs: int, width: int, limit: int | None) -> Any:
    """In a worker: the history, and the seconds of the training."""
    world = allhands.init(device=device)
    data = {
        name: catalogue.load("cifar10", split=name, root=root, limit=limit, dtype="uint8")
        for name in ("train", "valid")
    }
    torch.manual_seed(0)
    model = nn.Sequential(
        Normalized(), RandomCrop(4, mode="reflect"), RandomFlip(), ResNet18(width=width)
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = -(-len(data["train"]) // (BATCH * world.world_size)) * epochs
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.3, total_steps=steps, pct_start=0.2
    )
    began = time.perf_counter()
    history = allhands.SupervisedRunner(device=device).train(
        model=model,
        criterion=nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer=optimizer,
        scheduler=(scheduler, "step"),
        num_epochs=epochs,
        precision="bf16" if device == "cuda" else "fp32",
        metrics=["accuracy"],
        datasets={"batch_size": BATCH, **data},
        distributed="ddp",
    )
    seconds = time.perf_counter() - began
    allhands.finalize()
    return history["valid"]["accuracy"], seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", help="of the data set; default: where allhands looks for it")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--workers", type=int, help="default: one a GPU")
    parser.add_argument("--epochs", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--limit", type=int, help="images of each split, to see that it works")
    args = parser.parse_args()
    workers = args.workers or (torch.cuda.device_count() if args.device == "cuda" else 2)
    accuracy, seconds = spawn(
        train, (args.root, args.device, args.epochs, args.width, args.limit), workers=workers
    )[0]
    reached = next((epoch for epoch, value in enumerate(accuracy, 1) if value >= AIM), None)
    print(f"best {max(accuracy):.4f} after {args.epochs} epochs, {seconds:.1f} s; 94 %: {reached}")
    if args.limit is None:
        save_json(
            f"cifar10_{workers}",
            {
                "machine": machine(),
                "workers": workers,
                "batch of a worker": BATCH,
                "epochs": args.epochs,
                "accuracy": [round(value, 4) for value in accuracy],
                "epochs to 94 %": reached,
                "seconds": round(seconds, 1),
            },
        )


if __name__ == "__main__":
    main()
