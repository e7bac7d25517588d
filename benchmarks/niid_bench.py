"""Cells of NIID-Bench's CIFAR-10 table (Li et al., Federated Learning on Non-IID Data Silos, ICDE
2022), computed anew.

    python benchmarks/niid_bench.py [--cells fedavg,fedprox,scaffold,fedavg-100] [--no-augment]
    [--out FOLDER] [--name NAME]

The settings that the authors publish: their simple-cnn (two 5 x 5 convolutions, 6 and 16 channels,
then 120, 84, 10 units),
Dirichlet(0.5) over labels, SGD with rate 0.01, momentum 0.9 and weight decay 1e-5, batches of 64,
10 local epochs; 10 parties all taking part for 50 rounds, or 100 parties of which 10 take part for
500. As in the authors' code, pixels are in 0..1, and training images are padded by 4 (mirrored),
cropped at random and flipped at random. Published are the authors' own table and an independent
re-run with Flower. The file of results is written after every evaluated round, so that a run which
is ended early leaves what it has reached; `--join` puts files of single cells together, and
`--picture` draws a file of results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import RESULTS, machine
from torch import nn

from allhands import Federated, SupervisedRunner
from allhands.data import catalogue
from allhands.models import RandomCrop, RandomFlip
from allhands.runner.callbacks import Callback

CELLS: dict[str, dict[str, Any]] = {
    "fedavg": {"clients": 10, "rounds": 50, "algorithm": "fedavg", "published": [68.2, 62.5]},
    "fedprox": {
        "clients": 10,
        "rounds": 50,
        "algorithm": {"name": "fedprox", "mu": 0.001},
        "published": [67.9, 65.6],
    },
    "scaffold": {"clients": 10, "rounds": 50, "algorithm": "scaffold", "published": [69.8, 68.1]},
    "fedavg-100": {
        "clients": 100,
        "per_round": 10,
        "rounds": 500,
        "algorithm": "fedavg",
        "published": [59.4],
    },
}


class SimpleCNN(nn.Module):
    """NIID-Bench's simple-cnn: N x 3 x 32 x 32 to N x 10.

    Args:
        augment: crop and flip images at random while training.
        channels_last: lay images out so that processors convolve them faster; not under the
            executor "stacked".
    """

    def __init__(self, augment: bool, channels_last: bool) -> None:
        super().__init__()
        self.augment = (
            nn.Sequential(RandomCrop(4, mode="reflect"), RandomFlip()) if augment else nn.Identity()
        )
        self.format = torch.channels_last if channels_last else torch.preserve_format
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.augment(x).to(memory_format=self.format)
        for conv in (self.conv1, self.conv2):
            # The same numbers as relu before the maximum, of fewer.
            x = nn.functional.max_pool2d(conv(x), 2).relu()
        return self.fc3(self.fc2(self.fc1(x.flatten(1)).relu()).relu())


class Kept(Callback):
    """Hands the history on after every evaluated round, and ends the training when its time is
    over."""

    def __init__(self, keep: Callable[[dict[str, Any]], None], minutes: float | None) -> None:
        self.keep, self.ends = keep, None if minutes is None else time.perf_counter() + 60 * minutes

    def on_epoch_end(self, training: Any) -> None:
        if training.world.rank == 0:
            self.keep(training.history)
        if self.ends is not None and time.perf_counter() > self.ends:
            training.stop("the minutes given are over")


def images(root: str | None, limit: int | None) -> dict[str, Any]:
    """Both parts of CIFAR-10, with pixels in 0..1."""
    given: dict[str, Any] = {"root": root, "limit": limit, "normalize": False}
    return {split: catalogue.load("cifar10", split=split, **given) for split in ("train", "valid")}


def run(
    cell: str, args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """One cell: its history and figures, which `keep` is also given after every evaluated round."""
    settings = dict(CELLS[cell])
    published = settings.pop("published")
    settings["rounds"] = min(settings["rounds"], args.rounds or settings["rounds"])
    torch.manual_seed(args.seed)
    model = SimpleCNN(args.augment, args.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
    federated = Federated(
        **settings,
        partition={"name": "dirichlet", "alpha": 0.5},
        local_epochs=args.epochs,
        executor=args.executor,
        evaluate_every=1 if settings["rounds"] <= 50 else 10,
    )
    began = time.perf_counter()

    def row(history: dict[str, Any]) -> dict[str, Any]:
        accuracy = [100 * value for value in history["valid"]["accuracy"]]
        return {
            "cell": cell,
            "published": published,
            "best": max(accuracy),
            "last": accuracy[-1],
            "mean_of_last_five": sum(accuracy[-5:]) / len(accuracy[-5:]),
            "of_rounds": settings["rounds"],
            "rounds": [r + 1 for r in history["valid"]["round"]],
            "accuracy": accuracy,
            "loss": history["valid"]["loss"],
            "train_loss": history["train"]["loss"],
            "seconds": time.perf_counter() - began,
            "seed": args.seed,
            "augment": args.augment,
        }

    history = SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        metrics=["accuracy"],
        seed=args.seed,
        datasets={
            "batch_size": 64,
            "get_datasets_fn": images,
            "root": args.root,
            "limit": args.limit,
        },
        distributed=federated,
        workers=args.workers,
        callbacks=[Kept(lambda history: keep(row(history)), args.minutes)],
    )
    return row(history)


def train(args: argparse.Namespace, path: Path) -> None:
    """Compute the cells that are asked for, and write them to `path` as they come."""
    result: dict[str, Any] = {"machine": machine(), "epochs": args.epochs, "rows": []}

    def keep(row: dict[str, Any]) -> None:
        path.write_text(json.dumps({**result, "rows": [*result["rows"], row]}, indent=2) + "\n")

    for cell in (args.cells or ",".join(CELLS)).split(","):
        row = run(cell, args, keep)
        keep(row)
        result["rows"].append(row)
        shown = {
            key: row[key]
            for key in ("cell", "published", "best", "last", "mean_of_last_five", "seconds")
        }
        print(json.dumps(shown), flush=True)


def picture(rows: list[dict[str, Any]], path: str) -> None:
    """Draw accuracy over rounds of each cell, with the published values as lines and the run
    without crops and flips."""
    from matplotlib.figure import Figure

    plain = {
        row["cell"]: row
        for row in json.loads((RESULTS / "niid_bench_not_augmented.json").read_text())["rows"]
    }
    figure = Figure(figsize=(4.5 * len(rows), 3.6), layout="constrained")
    for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        for value, kind, name in zip(
            row["published"], ("--", ":"), ("its table", "re-run"), strict=False
        ):
            axes.axhline(
                value, linestyle=kind, linewidth=1, color="#606570", label=f"{name}, {value}"
            )
        without = plain[row["cell"]]
        axes.plot(
            without["rounds"], without["accuracy"], color="#b9bfca", label="no crops and flips"
        )
        axes.plot(row["rounds"], row["accuracy"], color="#d1495b", label="crops and flips")
        axes.set(title=row["cell"], xlabel="round", ylabel="test accuracy, %", ylim=(20, 75))
        axes.grid(axis="y", color="#d8dade", linewidth=0.8)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", help=f"all of them: {','.join(CELLS)}")
    parser.add_argument("--root", help="folder of CIFAR-10; None: that of ALLHANDS_DATA")
    parser.add_argument("--name", default="niid_bench", help="of the file of results")
    parser.add_argument("--out", help="folder for the result instead of benchmarks/results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="at most so many rounds")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, help="only the first so many images")
    parser.add_argument(
        "--augment",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="crop and flip at random",
    )
    parser.add_argument(
        "--channels-last",
        action="store_true",
        help="faster on processors; not with --executor stacked",
    )
    parser.add_argument(
        "--minutes", type=float, help="end each cell after the round in which so many are over"
    )
    parser.add_argument(
        "--join",
        nargs="+",
        metavar="FILE",
        help="train nothing: put the rows of these files together",
    )
    parser.add_argument(
        "--picture",
        metavar="PNG",
        help="draw the results at the end; without --cells and --join train nothing",
    )
    args = parser.parse_args()
    path = Path(args.out or RESULTS, f"{args.name}.json")
    if args.join:
        files = [json.loads(Path(file).read_text()) for file in args.join]
        joined = {**files[0], "rows": [row for file in files for row in file["rows"]]}
        path.write_text(json.dumps(joined, indent=2) + "\n")
    elif args.cells or not args.picture:
        train(args, path)
    if args.picture:
        picture(json.loads(path.read_text())["rows"], args.picture)


if __name__ == "__main__":
    main()
