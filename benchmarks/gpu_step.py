"""A training step on one GPU beside a loop written by hand (= 1.0): recorded in a CUDA graph, eager, Lightning, Accelerate.

    python benchmarks/gpu_step.py [--tasks regression,resnet-64,resnet-512] [--contenders …] [--turns 3] [--name NAME]

`regression` is the linear regression of the runner tutorial, 10,000 x 10, batch 32, Adam; the loop by hand reads it through a
DataLoader, as the tutorial's does. `resnet-N` is ResNet-18 on synthetic images of 32 x 32 in batches of N, SGD with momentum,
bf16 autocast, channels last; there the loop by hand keeps the images on the device and takes each batch by one index operation.
Contenders take turns in one process. A figure is the median of an epoch's seconds over its steps, without the first two epochs.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from report import machine, save_json
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner
from allhands.models import ResNet18

Seconds = list[float]


class Task:
    """A model with its data, the same at every call."""

    def __init__(self, name: str, quick: bool) -> None:
        self.name = name
        self.images = name.startswith("resnet")
        self.batch = int(name.split("-")[1]) if self.images else 32
        self.samples = (2 if quick else 64 if self.batch <= 64 else 24) * self.batch if self.images else 96 if quick else 10_000
        self.steps = -(-self.samples // self.batch)

    def parts(self) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, TensorDataset]:
        torch.manual_seed(0)
        if not self.images:
            inputs = torch.rand(self.samples, 10)
            model: nn.Module = nn.Linear(10, 1)
            return model, nn.MSELoss(), torch.optim.Adam(model.parameters()), TensorDataset(inputs, torch.rand(self.samples, 1))
        model = ResNet18().to(memory_format=torch.channels_last)
        data = TensorDataset(torch.randn(self.samples, 3, 32, 32), torch.randint(10, (self.samples,)))
        return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), data


def wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def by_hand(task: Task, epochs: int, device: torch.device) -> Seconds:
    model, criterion, optimizer, data = task.parts()
    model.to(device)  # in place: the optimizer's parameters are these
    if task.images:
        images, labels = (tensor.to(device) for tensor in data.tensors)
    seconds = []
    for _ in range(epochs):
        began = wait(device)
        if task.images:
            for wanted in torch.randperm(task.samples, device=device).split(task.batch):
                optimizer.zero_grad()
                with torch.autocast(device.type, torch.bfloat16):
                    loss = criterion(model(images[wanted]), labels[wanted])
                loss.backward()
                optimizer.step()
        else:
            for inputs, targets in DataLoader(data, batch_size=task.batch, shuffle=True):
                optimizer.zero_grad()
                loss = criterion(model(inputs.to(device)), targets.to(device))
                loss.backward()
                optimizer.step()
        seconds.append(wait(device) - began)
    return seconds


def ours(step: str) -> Callable[[Task, int, torch.device], Seconds]:
    def run(task: Task, epochs: int, device: torch.device) -> Seconds:
        model, criterion, optimizer, data = task.parts()
        history = SupervisedRunner(device=device.type).train(
            model=model, criterion=criterion, optimizer=optimizer, num_epochs=epochs, step=step,
            loaders={"train": DataLoader(data, batch_size=task.batch, shuffle=True)},
            precision="bf16" if task.images else "fp32",
        )  # fmt: skip
        return history["seconds"]

    return run


def with_lightning(task: Task, epochs: int, device: torch.device) -> Seconds:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, criterion, optimizer, data = task.parts()
    seconds: Seconds = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return criterion(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def on_train_epoch_start(self) -> None:
            self.began = wait(device)

        def on_train_epoch_end(self) -> None:
            seconds.append(wait(device) - self.began)

    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, max_epochs=epochs, default_root_dir=folder,
            logger=False, enable_model_summary=False, enable_progress_bar=False, enable_checkpointing=False,
            precision="bf16-mixed" if task.images else "32-true",
        ).fit(Module(), DataLoader(data, batch_size=task.batch, shuffle=True))  # fmt: skip
    return seconds


def with_accelerate(task: Task, epochs: int, device: torch.device) -> Seconds:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # the task before may have had another precision
    model, criterion, optimizer, data = task.parts()
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if task.images else "no")
    loader = DataLoader(data, batch_size=task.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seconds = []
    for _ in range(epochs):
        began = wait(device)
        for inputs, targets in loader:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = criterion(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        seconds.append(wait(device) - began)
    return seconds


CONTENDERS: dict[str, Callable[[Task, int, torch.device], Seconds]] = {
    "by_hand": by_hand, "graph": ours("graph"), "eager": ours("eager"), "lightning": with_lightning,
    "accelerate": with_accelerate,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="regression,resnet-64,resnet-512")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="by_hand is always there")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that the script works")
    parser.add_argument("--name", default="gpu_step", help="of the file of results")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [name for name in CONTENDERS if name == "by_hand" or name in args.contenders.split(",")]
    rows = []
    for task in (Task(name, args.quick) for name in args.tasks.split(",")):
        found: dict[str, Seconds] = {name: [] for name in names}
        for _ in range(1 if args.quick else args.turns):
            for name in names:
                seconds = CONTENDERS[name](task, 3 if args.quick else args.epochs, device)
                found[name].append(statistics.median(seconds[2:]) / task.steps)
        base = statistics.median(found["by_hand"])
        for name, values in found.items():
            row = {"task": task.name, "contender": name, "microseconds": 1e6 * statistics.median(values),
                   "turns": [1e6 * value for value in values], "times_by_hand": base / statistics.median(values)}  # fmt: skip
            rows.append(row)
            print(f"{task.name:12s} {name:16s} {row['microseconds']:10.1f} us a step  {row['times_by_hand']:6.2f} x", flush=True)
    if not args.quick:
        save_json(args.name, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
