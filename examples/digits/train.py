"""Train a small CNN on real images with several workers, and draw the learning curves.

    python examples/digits/train.py                     # 8x8 digits, two workers; needs no download
    python examples/digits/train.py --workers 1         # the same training in one process
    python examples/digits/train.py --data cifar10      # the folder that ALLHANDS_DATA names holds
    it

`run.yml` beside this file is the digits job for `allhands run`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from allhands import SupervisedRunner, current_world, models
from allhands.data import catalogue
from allhands.world import detect

# For each data set: epochs, samples per worker and step, and the largest learning rate.
JOBS = {"digits": (15, 32, 5e-3), "cifar10": (10, 64, 2e-3)}


def load_datasets(name: str, limit: int | None) -> dict[str, Any]:
    """Called in every worker, so that this process never holds the data."""
    return {split: catalogue.load(name, split, limit=limit) for split in ("train", "valid")}


def train(name: str, workers: int, epochs: int, limit: int | None, logdir: Path) -> dict[str, Any]:
    """Train on the data set of that name; returns the history."""
    _, batch_size, largest_lr = JOBS[name]
    about = catalogue.info(name)
    channels, image_size, _ = about.input_shape
    samples = min(about.sizes["train"], limit or about.sizes["train"])
    steps = -(-samples // (batch_size * workers)) * epochs

    torch.manual_seed(0)
    model = models.build(
        "simple_cnn",
        in_channels=channels,
        num_classes=about.num_classes,
        image_size=image_size,
        width=32,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=largest_lr)
    return SupervisedRunner().train(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, largest_lr, total_steps=steps),
        datasets={
            "batch_size": batch_size,
            "get_datasets_fn": load_datasets,
            "name": name,
            "limit": limit,
        },
        metrics=["accuracy"],
        main_metric="accuracy",
        minimize_metric=False,
        num_epochs=epochs,
        logdir=logdir,
        verbose=True,
        distributed="ddp",
        workers=workers,
    )


def main() -> None:
    """Read the command line, train, draw, and say where to look."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--data", choices=list(JOBS), default="digits")
    started_by_launcher = detect()
    count = (
        started_by_launcher.world_size if started_by_launcher else torch.cuda.device_count() or 2
    )
    options.add_argument(
        "--workers", type=int, default=count, help="default: one a GPU, or two without GPUs"
    )
    options.add_argument("--epochs", type=int, help="default: 15 for digits, 10 for cifar10")
    options.add_argument("--limit", type=int, help="use only the first so many images of each part")
    options.add_argument("--logdir", type=Path, help="default: logs/ and the name of the data set")
    given = options.parse_args()
    epochs = given.epochs or JOBS[given.data][0]
    logdir = given.logdir or Path("logs") / given.data

    started = time.perf_counter()
    history = train(given.data, given.workers, epochs, given.limit, logdir)
    seconds = time.perf_counter() - started
    world = current_world()
    if world is not None and world.rank != 0:  # started by a launcher: rank 0 speaks for all
        return
    workers = f"{given.workers} worker{'s' if given.workers > 1 else ''}"

    print(
        f"\nvalidation accuracy {history['valid']['accuracy'][-1]:.1%} after {epochs} epochs on "
        f"{workers}, {seconds:.1f} s"
    )
    print("Look at:")
    print(f"  tensorboard --logdir {logdir}")
    found = {
        "curves.png": "the learning curves",
        "metrics.csv": "their numbers",
        "checkpoints": "the last and the best weights",
        "report.html": "all of it on one page, for a browser",
    }
    for name, what in found.items():
        if (logdir / name).exists():  # pictures can be left out
            print(f"  {logdir / name}    {what}")


main()
