"""Cells of NIID-Bench's CIFAR-10 table (Li et al., Federated Learning on Non-IID Data Silos, ICDE 2022), computed anew.

    python benchmarks/niid_bench.py [--cells fedavg,fedprox,scaffold,fedavg-100] [--out FOLDER] [--name NAME] [--root DATA]

The settings that the authors publish: their simple-cnn (two 5 x 5 convolutions, 6 and 16 channels, then 120, 84, 10 units),
Dirichlet(0.5) over labels, SGD with rate 0.01, momentum 0.9 and weight decay 1e-5, batches of 64, 10 local epochs; 10 parties
all taking part for 50 rounds, or 100 parties of which 10 take part for 500. Images are normalised and NOT cropped or flipped at
random. Published are the authors' own table and an independent re-run with Flower. Each cell writes its accuracy by round.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from report import machine, save_json
from torch import nn

from allhands import Federated, SupervisedRunner
from allhands.data import catalogue

CELLS: dict[str, dict[str, Any]] = {
    "fedavg": {"clients": 10, "rounds": 50, "algorithm": "fedavg", "published": [68.2, 62.5]},
    "fedprox": {"clients": 10, "rounds": 50, "algorithm": {"name": "fedprox", "mu": 0.001}, "published": [67.9, 65.6]},
    "scaffold": {"clients": 10, "rounds": 50, "algorithm": "scaffold", "published": [69.8, 68.1]},
    "fedavg-100": {"clients": 100, "per_round": 10, "rounds": 500, "algorithm": "fedavg", "published": [59.4]},
}


class SimpleCNN(nn.Module):
    """NIID-Bench's simple-cnn: N x 3 x 32 x 32 to N x 10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in (self.conv1, self.conv2):
            x = nn.functional.max_pool2d(conv(x).relu(), 2)
        return self.fc3(self.fc2(self.fc1(x.flatten(1)).relu()).relu())


def images(root: str | None, limit: int | None) -> dict[str, Any]:
    """Both parts of CIFAR-10, normalised."""
    return {split: catalogue.load("cifar10", split=split, root=root, limit=limit) for split in ("train", "valid")}


def run(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    """One cell: its history and figures."""
    settings = dict(CELLS[cell])
    published = settings.pop("published")
    settings["rounds"] = min(settings["rounds"], args.rounds or settings["rounds"])
    torch.manual_seed(args.seed)
    model = SimpleCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
    federated = Federated(
        **settings, partition={"name": "dirichlet", "alpha": 0.5}, local_epochs=args.epochs, executor=args.executor,
        evaluate_every=1 if settings["rounds"] <= 50 else 10,
    )  # fmt: skip
    began = time.perf_counter()
    history = SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=optimizer, metrics=["accuracy"], seed=args.seed,
        datasets={"batch_size": 64, "get_datasets_fn": images, "root": args.root, "limit": args.limit},
        distributed=federated, workers=args.workers,
    )  # fmt: skip
    accuracy = [100 * value for value in history["valid"]["accuracy"]]
    return {
        "cell": cell, "published": published, "best": max(accuracy), "last": accuracy[-1],
        "mean_of_last_five": sum(accuracy[-5:]) / len(accuracy[-5:]), "rounds": [r + 1 for r in history["valid"]["round"]],
        "accuracy": accuracy, "seconds": time.perf_counter() - began, "seed": args.seed,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--root", help="folder of CIFAR-10; None: that of ALLHANDS_DATA")
    parser.add_argument("--name", default="niid_bench", help="of the file of results")
    parser.add_argument("--out", help="folder for the result instead of benchmarks/results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="at most so many rounds")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, help="only the first so many images")
    args = parser.parse_args()
    rows = []
    for cell in args.cells.split(","):
        rows.append(run(cell, args))
        shown = {key: rows[-1][key] for key in ("cell", "published", "best", "last", "mean_of_last_five", "seconds")}
        print(json.dumps(shown), flush=True)
    result = {"machine": machine(), "epochs": args.epochs, "rows": rows}
    if args.out:
        Path(args.out, f"{args.name}.json").write_text(json.dumps(result, indent=2) + "\n")
    else:
        save_json(args.name, result)


if __name__ == "__main__":
    main()
