"""What a step costs beside PyTorch's own work: the linear regression of the runner tutorial, 10,000
x 10, batch 32, Adam.

    python benchmarks/step_overhead.py            # 1 process: hand-written loop (= 1.0), allhands,
    # its own loop, Lightning, Accelerate
    python benchmarks/step_overhead.py --workers 2   # 2 gloo processes: raw DDP (= 1.0), allhands
    python benchmarks/step_overhead.py --instructions   # of the loops, beside the seconds

Every contender trains in a process of its own with one thread; the contenders take turns, so that a
change of the machine's speed meets all of them. The figure is CPU time (user and system, loader
processes included) of the training call, after a first training that warms up. Metrics, progress
bar and logging are on for allhands; the hand-written loop has none of them.

`--instructions` adds to the file of results how many instructions the processor executes, as
valgrind counts them, a figure that a busy machine does not change and that needs no counters of the
processor: those of a step, and those of a training beside its steps (its files and pictures), which
trainings of one and of three epochs tell apart. With workers it is the mean of theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from report import RESULTS, machine, save, save_json, summarize

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


def contender(name: str, epochs: int, counted: bool) -> None:
    """What runs in a process of its own: train once to warm up, train again and print the CPU time
    a step. Where instructions are counted, train twice more, `os.getsid` between them."""
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - contenders print, too
    CONTENDERS[name](1)
    if counted:
        os.getsid(0)
        CONTENDERS[name](1)
        os.getsid(0)
    before = cpu_seconds()
    CONTENDERS[name](epochs)
    if counted:
        os.getsid(0)
    steps = epochs * steps_of_epoch(workers)
    if workers > 1:
        import torch.distributed as dist

        dist.barrier()  # a rank that leaves early would break the others' last messages
        dist.destroy_process_group()
    print(
        json.dumps({"us": (cpu_seconds() - before) / steps * 1e6}), file=sys.__stdout__, flush=True
    )


def steps_of_epoch(workers: int) -> int:
    return -(-SAMPLES // (BATCH * workers))


def measure(name: str, epochs: int, workers: int, under: Sequence[str] = ()) -> float:
    """Microseconds of CPU time a step; the mean of the workers where there are several.

    Args:
        under: what the processes are started with: a tool and its options.
    """
    this = [str(Path(__file__)), "--contender", name, "--epochs", str(epochs)]
    this += ["--counted"] if under else []
    start = [*under, sys.executable]
    if workers > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        start = [*launcher, f"--nproc-per-node={workers}", *start]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run([*start, *this], capture_output=True, text=True, env=environ, check=False)
    lines = [float(us) for us in re.findall(r"\{\"us\": ([0-9.]+)\}", done.stdout)]
    if done.returncode != 0 or len(lines) != workers:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return sum(lines) / workers


def instructions(name: str, workers: int) -> dict[str, float]:
    """Instructions of a step, and of a training beside its steps; the mean of the workers."""
    if shutil.which("valgrind") is None:
        raise SystemExit("instructions are counted by valgrind, which is not installed")
    counts: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        # One process after the other writes a part at each os.getsid: the start, one epoch, three.
        tool = ["valgrind", "--tool=callgrind", "--dump-before=getsid"]
        measure(name, 3, workers, [*tool, f"--callgrind-out-file={folder}/%p"])
        for part in (2, 3):
            found = [
                int(line.split()[1])
                for path in Path(folder).glob(f"*.{part}")
                for line in path.read_text().splitlines()
                if line.startswith("totals:")
            ]
            counts[part] = sum(found) / workers
    steps = steps_of_epoch(workers)
    step = (counts[3] - counts[2]) / (2 * steps)
    return {"step": round(step), "training": round(counts[2] - steps * step)}


def count(names: Sequence[str], workers: int) -> None:
    """Add the instructions of these contenders to the file of results."""
    path = RESULTS / f"step_overhead_{workers}.json"
    result = json.loads(path.read_text())
    counts = {name: instructions(name, workers) for name in names}
    for name, found in counts.items():
        print(f"{name:14s} {found['step']:12,} a step {found['training']:14,} beside steps")
    result["instructions"] = {"of": counts, "machine": machine()}
    save_json(path.stem, result)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender:
        contender(given.contender, given.epochs, given.counted)
        return
    names = (
        ["by hand", "allhands", "own loop", "lightning", "accelerate"]
        if given.workers == 1
        else ["raw ddp", "allhands ddp", "own loop ddp"]
    )
    if given.instructions:
        count([name for name in names if name not in ("lightning", "accelerate")], given.workers)
        return
    times: dict[str, list[float]] = {name: [] for name in names}
    for run in range(given.runs):
        for name in names:
            times[name].append(measure(name, given.epochs, given.workers))
            print(
                f"run {run + 1}/{given.runs}  {name:14s} {times[name][-1]:8.1f} us a step",
                flush=True,
            )
    path = RESULTS / f"step_overhead_{given.workers}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    result = {
        "unit": "us of CPU time a step",
        "baseline": names[0],
        **summarize(times, names[0]),
        "machine": machine(),
    }
    if "instructions" in earlier:
        result["instructions"] = earlier["instructions"]
    save(path.stem, result)


if __name__ == "__main__":
    main()
