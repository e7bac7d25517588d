"""A small GPT on tiny Shakespeare with two workers: loss and bytes of local SGD beside ddp's, at
equal samples.

    python benchmarks/local_sgd.py [--epochs 2] [--rate 0.003] [--warm 0] [--beta2 0.999] [--clip C]
    [--seed 0]
        [--muon RATE [--momentum M]] [--cases NAME …] [--out NAME]

All train the same samples in the same order with AdamW, or with Muon at the rate `--muon` for the
layers' matrices and AdamW for all else, and a cosine schedule, after `--warm` steps in which the
rate rises, one thread a worker; the data set is looked for in ALLHANDS_DATA. Bytes are counted by
the strategy, and by the kernel: every run has a network namespace of its own (``unshare -rn``),
whose loopback carries nothing else, so that both workers' sockets are counted with all that torch
and TCP add, evaluation included. Where there can be no namespace, the kernel's figure is missing.
Times are not measured: a loopback is no slow link. Some begin with the weights and the optimizer's
state that ddp has after its first epoch, as DiLoCo begins with a model that was trained before;
their bytes are those of the epochs after it. What an earlier run of the same settings has left in
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
from allhands import DDP, Callback, LocalSGD, MuonAdamW, SupervisedRunner
from allhands.data import catalogue
from allhands.launch import spawn
from allhands.models.transformer import GPT

WORKERS, BATCH, BLOCK = 2, 16, 64
OPTIONS = ("epochs", "seed", "rate", "warm", "beta2", "clip", "muon", "momentum")
DILOCO = {"name": "nesterov", "lr": 0.7, "momentum": 0.9}
RARELY: dict[str, dict[str, Any]] = {
    "average, H=32": {"every": 32},
    "nesterov, H=32": {"every": 32, "outer": DILOCO},
    "average, H=32, int8": {"every": 32, "compress": "int8"},
    "nesterov, H=32, int8, 4 fragments": {
        "every": 32,
        "outer": DILOCO,
        "compress": "int8",
        "fragments": 4,
    },
}
LATER = "after an epoch of ddp: "
CASES: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    **{LATER + name: case for name, case in RARELY.items()},
    **RARELY,
}
# About 1/25 of ddp's bytes, most of them in the first half.
CASES["average, H=4 and then H=32, int8"] = {
    "first": {"every": 4, "compress": "int8"},
    **RARELY["average, H=32, int8"],
}
CASES["less nesterov, H=32"] = {
    "every": 32,
    "outer": {"name": "nesterov", "lr": 1.0, "momentum": 0.3},
}
CASES["half nesterov, H=32"] = {
    "every": 32,
    "outer": {"name": "nesterov", "lr": 1.0, "momentum": 0.5},
}
CASES["half nesterov, H=32, int8"] = CASES["half nesterov, H=32"] | {"compress": "int8"}


class NextToken(nn.Module):
    """The mean cross entropy of all positions."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Rate:
    """Of the largest rate, what a step has: it rises evenly for `warm` steps and falls along half a
    cosine to 0."""

    def __init__(self, warm: int, steps: int) -> None:
        self.warm, self.steps = warm, steps

    def __call__(self, step: int) -> float:
        if step < self.warm:
            return (step + 1) / self.warm
        return 0.5 * (1 + math.cos(math.pi * (step - self.warm) / (self.steps - self.warm)))


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


def train(
    case: dict[str, Any] | None,
    epochs: int,
    seed: int,
    rate: float,
    warm: int,
    beta2: float,
    clip: float | None,
    muon: float | None,
    momentum: float | None,
    logdir: str | None,
    start: str | None,
) -> dict[str, Any]:
    """One training, in a worker."""
    allhands.init(device="cpu")
    torch.manual_seed(seed)
    model = GPT(block_size=BLOCK, layers=2, heads=4, width=64)
    parts = {
        split: catalogue.load("shakespeare", split=split, block=BLOCK)
        for split in ("train", "valid")
    }
    if muon is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, betas=(0.9, beta2), weight_decay=0.01
        )
    else:
        turned = {} if momentum is None else {"momentum": momentum}
        optimizer = MuonAdamW(
            model, lr=rate, muon_lr=muon, betas=(0.9, beta2), weight_decay=0.01, **turned
        )
    steps = epochs * math.ceil(len(parts["train"]) / (BATCH * WORKERS))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Rate(warm, steps))
    legs: list[tuple[Any, int]] = [(case, epochs)]
    if case is not None and "first" in case:
        legs = [
            (case["first"], epochs // 2),
            ({key: value for key, value in case.items() if key != "first"}, epochs),
        ]
    found = {"exchanged": 0, "means": 0, "wire": 0}
    for leg, (settings, until) in enumerate(legs):
        strategy = DDP() if settings is None else LocalSGD(**settings)
        wire = Wire()
        history = SupervisedRunner(device="cpu").train(
            model=model,
            criterion=NextToken(),
            optimizer=optimizer,
            num_epochs=until,
            distributed=strategy,
            seed=seed,
            verbose=False,
            logdir=logdir,
            resume="auto" if leg else start,
            clip_norm=clip,
            loaders={
                name: DataLoader(part, BATCH, shuffle=name == "train")
                for name, part in parts.items()
            },
            callbacks=[wire],
            scheduler=(scheduler, "step"),
        )
        found["wire"] += wire.carried / WORKERS
        if isinstance(strategy, LocalSGD):
            found["exchanged"] += strategy.sent
            found["means"] += strategy.sent_for_means
    steps -= len(parts["train"]) // (BATCH * WORKERS) + 1 if start else 0
    numbers = sum(p.numel() for p in model.parameters())
    if case is None:  # A ring sends 2 (N - 1) / N times what it adds up.
        found["exchanged"] = steps * 4 * numbers * 2 * (WORKERS - 1) // WORKERS
    allhands.finalize()
    return {
        "parameters": numbers,
        "steps": steps,
        **found,
        "train": history["train"]["loss"],
        "valid": history["valid"]["loss"],
    }


def _apart(name: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """A training in a network namespace of its own; without the kernel's count where there can be
    none."""
    options = {key: getattr(args, key) for key in OPTIONS if getattr(args, key) is not None}
    command = [sys.executable, __file__, "--case", name, "--folder", folder]
    command += [f"--{key}={value}" for key, value in options.items()]
    namespace = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    able = shutil.which("unshare") is not None and shutil.which("ip") is not None
    able = (
        able
        and subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode == 0
    )
    done = subprocess.run(
        [*(namespace if able else []), *command], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found if able else found | {"wire": None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--warm", type=int, default=0)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--muon", type=float)
    parser.add_argument("--momentum", type=float)
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=list(CASES),
        default=list(CASES),
        help="those that begin with ddp need it too",
    )
    parser.add_argument("--out", default="local_sgd")
    parser.add_argument("--case", help="train this one alone and print what came of it")
    parser.add_argument("--folder", help="with --case: where ddp leaves its checkpoints")
    args = parser.parse_args()
    if args.case is not None:
        case = CASES[args.case]
        logdir = args.folder if case is None or "first" in case else None
        start = f"{args.folder}/checkpoints/epoch-0001" if args.case.startswith(LATER) else None
        given = (case, *(getattr(args, key) for key in OPTIONS), logdir, start)
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
    earlier = RESULTS / f"{args.out}.json"
    result = json.loads(earlier.read_text()) if earlier.exists() else {}
    runs = (
        result.get("runs", {})
        if all(result.get(key) == value for key, value in settings.items())
        else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases:
            if name == "ddp" or name not in runs:
                runs[name] = _apart(name, args, folder)
                save_json(args.out, {"machine": machine(), **settings, "runs": runs})
            if "ddp" in runs:
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
    print(
        f"{name:56s} valid {run['valid'][-1]:.4f} ({loss:+.2%}), bytes 1/{sent:.1f}{said}",
        flush=True,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
