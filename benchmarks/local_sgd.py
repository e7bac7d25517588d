"""A small GPT on tiny Shakespeare with two workers: loss and bytes of local SGD beside ddp's, at equal samples.

    python benchmarks/local_sgd.py [--epochs 2] [--seed 0] [--out NAME]

All train the same samples in the same order with AdamW and a cosine schedule, one thread a worker; the data set is looked for in
ALLHANDS_DATA. Bytes are counted by the strategy, and by the kernel: every run has a network namespace of its own
(``unshare -rn``), whose loopback carries nothing else, so that both workers' sockets are counted with all that torch and TCP
add, evaluation included. Where there can be no namespace, the kernel's figure is missing. Times are not measured: a loopback is
no slow link. Some begin with the weights and the optimizer's state that ddp has after its first epoch, as DiLoCo begins with a
model that was trained before; their bytes are those of the epochs after it. What an earlier run of the same settings has left in
the file of results is kept, and only what is missing is run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from report import RESULTS, machine, save_json
from torch import nn
from torch.utils.data import DataLoader

import allhands
from allhands import DDP, Callback, LocalSGD, SupervisedRunner
from allhands.data import catalogue
from allhands.launch import spawn
from allhands.models.transformer import GPT

WORKERS, BATCH, BLOCK, RATE = 2, 16, 64, 3e-3
DILOCO = {"name": "nesterov", "lr": 0.7, "momentum": 0.9}
RARELY: dict[str, dict[str, Any]] = {
    "average, H=32": {"every": 32},
    "nesterov, H=32": {"every": 32, "outer": DILOCO},
    "average, H=32, int8": {"every": 32, "exchange": "int8"},
    "nesterov, H=32, int8, 4 fragments": {"every": 32, "outer": DILOCO, "exchange": "int8", "fragments": 4},
}
LATER = "after an epoch of ddp: "
CASES: dict[str, dict[str, Any] | None] = {"ddp": None, **{LATER + name: case for name, case in RARELY.items()}, **RARELY}


class NextToken(nn.Module):
    """The mean cross entropy of all positions."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Wire(Callback):
    """Bytes that the loopback has carried in the training loop."""

    def on_train_start(self, training: Any) -> None:
        torch.distributed.barrier()
        self.before = _carried()

    def on_train_end(self, training: Any) -> None:
        torch.distributed.barrier()
        self.carried = _carried() - self.before


def _carried() -> int:
    lines = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()]
    return next(int(fields[9]) for fields in lines if fields[0] == "lo:")


def train(case: dict[str, Any] | None, epochs: int, seed: int, logdir: str | None, start: str | None) -> dict[str, Any]:
    """One training, in a worker."""
    allhands.init(device="cpu")
    torch.manual_seed(seed)
    model = GPT(block_size=BLOCK, layers=2, heads=4, width=64)
    parts = {split: catalogue.load("shakespeare", split=split, block=BLOCK) for split in ("train", "valid")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    steps = epochs * math.ceil(len(parts["train"]) / (BATCH * WORKERS))
    strategy = DDP() if case is None else LocalSGD(**case)
    wire = Wire()
    history = SupervisedRunner(device="cpu").train(
        model=model, criterion=NextToken(), optimizer=optimizer, num_epochs=epochs, distributed=strategy, seed=seed,
        verbose=False, logdir=logdir, resume=start,
        loaders={name: DataLoader(part, BATCH, shuffle=name == "train") for name, part in parts.items()}, callbacks=[wire],
        scheduler=(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps), "step"),
    )  # fmt: skip
    steps -= len(parts["train"]) // (BATCH * WORKERS) + 1 if start else 0
    numbers = sum(p.numel() for p in model.parameters())
    # A ring sends 2 (N - 1) / N times what it adds up.
    counted = steps * 4 * numbers * 2 * (WORKERS - 1) // WORKERS if isinstance(strategy, DDP) else strategy.sent
    means = 0 if isinstance(strategy, DDP) else strategy.sent_for_means
    allhands.finalize()
    return {
        "parameters": numbers, "steps": steps, "exchanged": counted, "means": means, "wire": wire.carried / WORKERS,
        "train": history["train"]["loss"], "valid": history["valid"]["loss"],
    }  # fmt: skip


def _apart(name: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """A training in a network namespace of its own; without the kernel's count where there can be none."""
    command = [
        sys.executable,
        __file__,
        "--case",
        name,
        "--epochs",
        str(args.epochs),
        "--seed",
        str(args.seed),
        "--folder",
        folder,
    ]
    namespace = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    able = shutil.which("unshare") is not None and shutil.which("ip") is not None
    able = able and subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode == 0
    done = subprocess.run([*(namespace if able else []), *command], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found if able else found | {"wire": None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="local_sgd")
    parser.add_argument("--case", help="train this one alone and print what came of it")
    parser.add_argument("--folder", help="with --case: where ddp leaves its checkpoints")
    args = parser.parse_args()
    if args.case is not None:
        logdir = args.folder if args.case == "ddp" else None
        start = f"{args.folder}/checkpoints/epoch-0001" if args.case.startswith(LATER) else None
        given = (CASES[args.case], args.epochs, args.seed, logdir, start)
        print(json.dumps(spawn(train, given, workers=WORKERS, threads=1, env={"OMP_NUM_THREADS": "1"})[0]))
        return
    settings = {"workers": WORKERS, "batch": BATCH, "block": BLOCK, "epochs": args.epochs, "seed": args.seed}
    earlier = RESULTS / f"{args.out}.json"
    result = json.loads(earlier.read_text()) if earlier.exists() else {}
    runs = result.get("runs", {}) if all(result.get(key) == value for key, value in settings.items()) else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            if name == "ddp" or name not in runs:
                runs[name] = _apart(name, args, folder)
                save_json(args.out, {"machine": machine(), **settings, "runs": runs})
            _tell(name, runs[name], runs["ddp"])


def _tell(name: str, run: dict[str, Any], ddp: dict[str, Any]) -> None:
    """The loss beside ddp's, and bytes of a step as a part of ddp's."""
    shorter = run["steps"] / ddp["steps"]
    sent, wire = (
        shorter * ddp["exchanged"] / (run["exchanged"] + run["means"]),
        ddp["wire"] and shorter * ddp["wire"] / run["wire"],
    )
    loss = run["valid"][-1] / ddp["valid"][-1] - 1
    said = "" if wire is None else f", on the wire 1/{wire:.1f}"
    print(f"{name:56s} valid {run['valid'][-1]:.4f} ({loss:+.2%}), bytes 1/{sent:.1f}{said}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
