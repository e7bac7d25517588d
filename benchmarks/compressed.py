"""A small GPT on tiny Shakespeare with two workers: loss and bytes of ddp with compressed gradients
beside ddp's.

    python benchmarks/compressed.py [--epochs 2] [--seeds 0 1] [--optimizer adamw|sgd] [--rate
    0.003] [--cases NAME …]

The training is that of `local_sgd.py`: the same samples in the same order and a cosine schedule,
one thread a worker; with AdamW,
or with SGD with a momentum of 0.9 and clipping to a norm of 1. Bytes are counted by the kernel:
every run has a network namespace of its own (``unshare -rn``), whose loopback carries nothing else,
so that both workers' sockets are counted with all that torch
and TCP add, evaluation included. Times are not measured: a loopback is no slow link. What an
earlier run of the same settings
has left in the file of results is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from typing import Any

import torch
from local_sgd import BATCH, BLOCK, WORKERS, NextToken, Rate, Wire
from report import RESULTS, machine, save_json
from torch.utils.data import DataLoader

import allhands
from allhands import DDP, SupervisedRunner
from allhands.data import catalogue
from allhands.launch import spawn
from allhands.models.transformer import GPT

OPTIONS = ("optimizer", "rate", "epochs")
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "bf16": {"compress": "bf16"},
    "powersgd": {"compress": "powersgd"},
    "powersgd, rank 4": {"compress": {"name": "powersgd", "rank": 4}},
    "powersgd, rank 4, after 98 steps": {"compress": {"name": "powersgd", "rank": 4, "start": 98}},
}


def train(
    settings: dict[str, Any], epochs: int, seed: int, optimizer_name: str, rate: float
) -> dict[str, Any]:
    """One training, in a worker."""
    allhands.init(device="cpu")
    torch.manual_seed(seed)
    model = GPT(block_size=BLOCK, layers=2, heads=4, width=64)
    parts = {
        split: catalogue.load("shakespeare", split=split, block=BLOCK)
        for split in ("train", "valid")
    }
    adamw = optimizer_name == "adamw"
    kind, options = (
        (torch.optim.AdamW, {"weight_decay": 0.01})
        if adamw
        else (torch.optim.SGD, {"momentum": 0.9})
    )
    optimizer = kind(model.parameters(), lr=rate, **options)
    steps = epochs * math.ceil(len(parts["train"]) / (BATCH * WORKERS))
    scheduler, wire = torch.optim.lr_scheduler.LambdaLR(optimizer, Rate(0, steps)), Wire()
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=NextToken(),
        optimizer=optimizer,
        num_epochs=epochs,
        distributed=DDP(**settings),
        seed=seed,
        verbose=False,
        callbacks=[wire],
        clip_norm=None if adamw else 1.0,
        scheduler=(scheduler, "step"),
        loaders={
            name: DataLoader(part, BATCH, shuffle=name == "train") for name, part in parts.items()
        },
    )
    allhands.finalize()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "wire": wire.carried / WORKERS,
        "train": history["train"]["loss"],
        "valid": history["valid"]["loss"],
    }


def apart(name: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """A training in a network namespace of its own."""
    command = [sys.executable, __file__, "--case", name, "--seeds", str(seed)]
    command += [f"--{key}={getattr(args, key)}" for key in OPTIONS]
    namespace = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    done = subprocess.run([*namespace, *command], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--case", help="train this one alone and print what came of it")
    args = parser.parse_args()
    if args.case is not None:
        given = (CASES[args.case], args.epochs, args.seeds[0], args.optimizer, args.rate)
        print(
            json.dumps(
                spawn(train, given, workers=WORKERS, threads=1, env={"OMP_NUM_THREADS": "1"})[0]
            )
        )
        return
    settings = {
        "workers": WORKERS,
        "batch": BATCH,
        "block": BLOCK,
        **{key: getattr(args, key) for key in OPTIONS},
    }
    out = "compressed" if args.optimizer == "adamw" else "compressed_sgd"
    earlier = RESULTS / f"{out}.json"
    result = json.loads(earlier.read_text()) if earlier.exists() else {}
    runs = (
        result.get("runs", {})
        if all(result.get(key) == value for key, value in settings.items())
        else {}
    )
    for seed in args.seeds:
        for name in args.cases:
            of_case = runs.setdefault(name, {})
            if str(seed) not in of_case:
                of_case[str(seed)] = apart(name, args, seed)
                save_json(out, {"machine": machine(), **settings, "runs": runs}, quiet=True)
    for name, of_case in runs.items():
        seeds = [seed for seed in of_case if seed in runs["ddp"]]
        beside = [of_case[seed]["valid"][-1] / runs["ddp"][seed]["valid"][-1] - 1 for seed in seeds]
        fewer = statistics.mean(runs["ddp"][seed]["wire"] / of_case[seed]["wire"] for seed in seeds)
        loss = statistics.mean(of_case[seed]["valid"][-1] for seed in seeds)
        print(
            f"{name:20s} valid {loss:.4f} ({', '.join(f'{value:+.2%}' for value in beside)}), "
            f"bytes 1/{fewer:.2f}"
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
