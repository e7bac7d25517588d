"""What a step costs beside PyTorch's own work: the linear regression of the runner tutorial, 10,000
x 10, batch 32, Adam.

    python benchmarks/step_overhead.py            # 1 process: hand-written loop (= 1.0), allhands,
    # its own loop, Lightning, Accelerate
    python benchmarks/step_overhead.py --workers 2   # 2 gloo processes: raw DDP (= 1.0), allhands

Every contender trains in a process of its own with one thread; the contenders take turns, so that a
change of the machine's speed meets all of them. The figure is CPU time (user and system, loader
processes included) of the training call, after a first training that warms up. Metrics, progress
bar and logging are on for allhands; the hand-written loop has none of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from report import machine, save, summarize

SAMPLES, FEATURES, BATCH = 10_000, 10, 32


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    return sum(
        u.ru_utime + u.ru_stime
        for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def problem():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    inputs = torch.rand(SAMPLES, FEATURES)
    data = TensorDataset(inputs, torch.rand(SAMPLES, 1))
    model = torch.nn.Linear(FEATURES, 1)
    return model, torch.nn.MSELoss(), torch.optim.Adam(model.parameters()), data, DataLoader


def by_hand(epochs: int) -> None:
    model, criterion, optimizer, data, loader_class = problem()
    for _ in range(epochs):
        for inputs, targets in loader_class(data, batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()


def mean_absolute_error(output, target):
    return (output - target).abs().mean()


def with_allhands(epochs: int) -> None:
    from rich.console import Console

    from allhands import SupervisedRunner

    # The bar is drawn only on a terminal; here one is claimed, so that its cost is measured too.
    Console.is_interactive = property(lambda self: True, lambda self, value: None)
    model, criterion, optimizer, data, loader_class = problem()
    with tempfile.TemporaryDirectory() as logdir:
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=criterion,
            optimizer=optimizer,
            metrics={"mae": mean_absolute_error},
            loaders={"train": loader_class(data, batch_size=BATCH, shuffle=True)},
            num_epochs=epochs,
            verbose=True,
            logdir=logdir,
        )


def with_own_loop(epochs: int) -> None:
    import allhands

    model, criterion, optimizer, data, loader_class = problem()
    with tempfile.TemporaryDirectory() as logdir:
        loop = allhands.Loop(
            model=model,
            optimizer=optimizer,
            loaders={"train": loader_class(data, batch_size=BATCH, shuffle=True)},
            logdir=logdir,
            device="cpu",
        )

        def loss_of(batch):
            output = loop.model(batch[0])
            return {
                "loss": criterion(output, batch[1]),
                "mae": mean_absolute_error(output.detach(), batch[1]),
            }

        for epoch in loop.epochs(epochs):
            for batch in epoch.train:
                loop.step(loss_of, batch)


def with_lightning(epochs: int) -> None:
    import logging

    import lightning
    import torch

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, criterion, _, data, loader_class = problem()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            output = self.model(batch[0])
            loss = criterion(output, batch[1])
            self.log("loss", loss, on_epoch=True, on_step=False)
            self.log(
                "mae", mean_absolute_error(output.detach(), batch[1]), on_epoch=True, on_step=False
            )
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    with tempfile.TemporaryDirectory() as logdir:
        lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            default_root_dir=logdir,
            enable_model_summary=False,
        ).fit(Module(), loader_class(data, batch_size=BATCH, shuffle=True))


def with_accelerate(epochs: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, criterion, optimizer, data, loader_class = problem()
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, loader_class(data, batch_size=BATCH, shuffle=True)
    )
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()


def raw_ddp(epochs: int) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model, criterion, optimizer, data, loader_class = problem()
    sampler = DistributedSampler(data)
    wrapped = DistributedDataParallel(model)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader_class(data, batch_size=BATCH, sampler=sampler):
            optimizer.zero_grad()
            loss = criterion(wrapped(inputs), targets)
            loss.backward()
            optimizer.step()


CONTENDERS = {
    "by hand": by_hand,
    "allhands": with_allhands,
    "own loop": with_own_loop,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "raw ddp": raw_ddp,
    "allhands ddp": with_allhands,
    "own loop ddp": with_own_loop,
}


def contender(name: str, epochs: int) -> None:
    """What runs in a process of its own: train once to warm up, train again and print the CPU time
    a step."""
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - contenders print, too
    CONTENDERS[name](1)
    before = cpu_seconds()
    CONTENDERS[name](epochs)
    steps = epochs * -(-SAMPLES // (BATCH * workers))
    if workers > 1:
        import torch.distributed as dist

        dist.barrier()  # a rank that leaves early would break the others' last messages
        dist.destroy_process_group()
    print(
        json.dumps({"us": (cpu_seconds() - before) / steps * 1e6}), file=sys.__stdout__, flush=True
    )


def measure(name: str, epochs: int, workers: int) -> float:
    """Microseconds of CPU time a step; the mean of the workers where there are several."""
    this = [str(Path(__file__)), "--contender", name, "--epochs", str(epochs)]
    start = (
        [sys.executable]
        if workers == 1
        else [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={workers}",
        ]
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, *this], capture_output=True, text=True, env=environ, check=False)
    lines = [float(us) for us in re.findall(r"\{\"us\": ([0-9.]+)\}", done.stdout)]
    if done.returncode != 0 or len(lines) != workers:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return sum(lines) / workers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender:
        contender(given.contender, given.epochs)
        return
    names = (
        ["by hand", "allhands", "own loop", "lightning", "accelerate"]
        if given.workers == 1
        else ["raw ddp", "allhands ddp", "own loop ddp"]
    )
    times: dict[str, list[float]] = {name: [] for name in names}
    for run in range(given.runs):
        for name in names:
            times[name].append(measure(name, given.epochs, given.workers))
            print(
                f"run {run + 1}/{given.runs}  {name:14s} {times[name][-1]:8.1f} us a step",
                flush=True,
            )
    result = {
        "unit": "us of CPU time a step",
        "baseline": names[0],
        **summarize(times, names[0]),
        "machine": machine(),
    }
    save(f"step_overhead_{given.workers}", result)


if __name__ == "__main__":
    main()
