"""Local SGD over a slow link: exchanges that steps wait for, and those beside the next steps.

    python benchmarks/local_sgd_overlap.py [--rates 200 800] [--turns 3] [--out NAME]

Two workers of one thread each train a small GPT on random tokens. They are in a network namespace
of their own (``unshare -rn``), whose loopback is shaped by ``tc`` to so many Mbit/s, which both
share. Each turn trains an epoch without exchanges, one that waits and one with ``overlap``, in this
order; figures are medians of the turns, of milliseconds a step. An epoch ends as the last exchange
arrives; the mean of the weights at its end is in all figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import torch
from report import machine, save_json
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import LocalSGD, SupervisedRunner
from allhands.launch import spawn
from allhands.models.transformer import GPT

WORKERS, BATCH, BLOCK, STEPS, EVERY = 2, 4, 64, 39, 8
CASES = {
    "no exchange": LocalSGD(every=10_000, mix=0.5),
    "waits": LocalSGD(every=EVERY, mix=0.5),
    "beside 7 steps": LocalSGD(every=EVERY, mix=0.5, overlap=EVERY - 1),
}


def next_token(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (
        nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        .view(len(target), -1)
        .mean(1)
        .mean()
    )


def train(turns: int) -> dict[str, list[float]]:
    """Milliseconds of a step by case, one of each turn; the first turn is left out."""
    world = allhands.init(device="cpu")
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (STEPS * BATCH * world.world_size, BLOCK + 1))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    found: dict[str, list[float]] = {name: [] for name in CASES}
    for turn in range(turns + 1):
        for name, strategy in CASES.items():
            torch.manual_seed(0)
            model = GPT(vocab_size=64, block_size=BLOCK, layers=2, width=256, heads=4)
            history: Any = SupervisedRunner(device="cpu").train(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
                criterion=next_token,
                loaders={"train": DataLoader(data, BATCH)},
                num_epochs=1,
                distributed=strategy,
                verbose=False,
            )
            if turn:
                found[name].append(history["seconds"][-1] / STEPS * 1000)
    numbers = sum(p.numel() for p in model.parameters())
    return {**found, "numbers": [numbers]}


def shaped(rate: int, turns: int) -> dict[str, list[float]]:
    """`train` on a loopback of `rate` Mbit/s."""
    script = (
        "ip link set lo mtu 1500 up && "
        f"tc qdisc add dev lo root tbf rate {rate}mbit burst 256kb latency 400ms && "
        'exec "$0" "$@"'
    )
    words = ["unshare", "-rn", "sh", "-c", script, sys.executable, __file__, "--worker"]
    done = subprocess.run(
        [*words, "--turns", str(turns)], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=int, nargs="+", default=[200, 800])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", default="local_sgd_overlap")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(spawn(train, (given.turns,), workers=WORKERS)[0]))
        return
    rows, numbers = [], 0
    for rate in given.rates:
        found = shaped(rate, given.turns)
        numbers = int(found.pop("numbers")[0])
        rows.append({"mbit": rate} | {name: statistics.median(x) for name, x in found.items()})
        print(rows[-1], flush=True)
    save_json(
        given.out,
        {
            "machine": machine(),
            "workers": WORKERS,
            "every": EVERY,
            "numbers": numbers,
            "turns": given.turns,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
