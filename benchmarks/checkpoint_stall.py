"""What saving costs the steps: blocks of 100 steps with a save every 50, against blocks without, in
one training.

    python benchmarks/checkpoint_stall.py [--workers 1] [--blocks 8] [--optimizer adam]

The model has 13 million parameters (52 MB); momentum doubles what is saved, Adam trebles it. Blocks
take turns, and each is compared with the mean of its two neighbours, so that a drift of the
machine's speed cancels. A block ends when its last save is on the disk, so that what a save costs
is paid in its own block.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import machine, save_json
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Callback, SupervisedRunner

EVERY, BLOCK = 50, 100


class Blocks(Callback):
    """Saves in every second block, and times all blocks but the first."""

    def __init__(self) -> None:
        self.started = 0.0
        self.times: list[float] = []
        self.stalls: list[float] = []

    def on_step_end(self, training: Any) -> None:
        block, within = divmod(training.step, BLOCK)
        if within == 0:
            training.loop.checkpoints.wait()
            now = time.perf_counter()
            if block > 1:
                self.times.append(now - self.started)
            self.started = now
        if within % EVERY == 0 and block % 2 == 0 and block > 0:
            before = time.perf_counter()
            training.save_checkpoint()
            self.stalls.append(time.perf_counter() - before)

    def state_dict(self) -> dict[str, Any]:
        return {"times": self.times, "stalls": self.stalls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.times, self.stalls = state["times"], state["stalls"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=8, help="blocks with saves")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--optimizer", choices=["sgd", "momentum", "adam"], default="adam")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1024, 2400),
        nn.ReLU(),
        nn.Linear(2400, 2400),
        nn.ReLU(),
        nn.Linear(2400, 2000),
        nn.ReLU(),
        nn.Linear(2000, 10),
    )
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-3),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-4),
    }[options.optimizer]()
    steps = BLOCK * (2 + 2 * options.blocks)
    samples = steps * options.batch * options.workers
    rows = 4096
    x, y = torch.randn(rows, 1024), torch.randint(0, 10, (rows,))
    sampler = torch.utils.data.RandomSampler(range(rows), replacement=True, num_samples=samples)
    loader = DataLoader(TensorDataset(x, y), options.batch, sampler=sampler)
    callback = Blocks()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".checkpoint-stall-") as logdir:
        SupervisedRunner(device=options.device).train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=optimizer,
            loaders={"train": loader},
            callbacks=[callback],
            logdir=logdir,
            distributed=options.workers > 1,
            workers=options.workers if options.workers > 1 else None,
        )
    without, saving = callback.times[::2], callback.times[1::2]
    ratios = sorted(
        2 * a / (before + after)
        for before, a, after in zip(without, saving, without[1:], strict=False)
    )
    ratio, step = statistics.median(ratios), statistics.median(without) / BLOCK
    stall = statistics.median(callback.stalls)
    result = {
        "parameters": parameters,
        "optimizer": options.optimizer,
        "workers": options.workers,
        "batch": options.batch,
        "steps between saves": EVERY,
        "ratio": {"median": round(ratio, 4), "all": [round(r, 4) for r in ratios]},
        "milliseconds a step without saving": round(1000 * step, 2),
        "milliseconds the saving step stands still": round(1000 * stall, 2),
        "machine": machine(),
    }
    print(
        f"{parameters * 4 / 1e6:.0f} MB model, {options.optimizer}, {options.workers} worker(s): "
        f"steps with a save every {EVERY} take {ratio:.3f} of those without ({1000 * step:.1f} ms "
        f"a step); the saving step stands still for {1000 * stall:.1f} ms"
    )
    save_json(f"checkpoint_stall_{options.optimizer}_{options.workers}", result)


if __name__ == "__main__":
    main()
