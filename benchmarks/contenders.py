"""What `gpu_workers.py` measures: the tasks, and who takes them on, each in the way that its users
write it.

Every function in `CONTENDERS` trains one task for some epochs in a process that is already one of a
group, and keeps the epochs' seconds in the clock that it is given. With one worker each does what
its users do in a single process: no wrapper, no sampler.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from allhands import SupervisedRunner, World
from allhands.models import ResNet18
from allhands.models.transformer import GPT, NextToken
from allhands.runner.callbacks import Callback

GPT_124M = {"vocab_size": 50304, "block_size": 1024, "layers": 12, "heads": 12, "width": 768}
GPT_TINY = {"vocab_size": 64, "block_size": 32, "layers": 2, "heads": 2, "width": 32}
TASKS = ("regression", "resnet-64", "resnet-512", "gpt-124M")


@dataclass
class Parts:
    """What one training is made of; the data lies in the host's memory."""

    model: nn.Module
    criterion: nn.Module
    optimizer: torch.optim.Optimizer
    data: TensorDataset


class Task:
    """A model with its data, the same at every call. `batch` is a worker's, and an epoch has
    `steps` of them on each."""

    def __init__(self, name: str, workers: int, quick: bool) -> None:
        self.name, self.quick = name, quick
        kind, _, size = name.partition("-")
        self.kind = kind
        self.batch = {"regression": 32, "gpt": 2 if quick else 16}.get(kind) or (
            8 if quick else int(size)
        )
        self.narrow = kind != "regression"
        if kind == "regression":
            self.samples = 96 if quick else 10_000
        else:
            self.samples = (
                (2 if quick else 20 if kind == "gpt" else 64 if self.batch <= 64 else 32)
                * self.batch
                * workers
            )
        self.steps = -(-self.samples // (self.batch * workers))
        # Epochs that are not counted: kernels are chosen, compiled and captured in them.
        self.warm = 1 if quick else 2
        self.epochs = self.warm + (1 if quick else 2 if kind == "gpt" else 4)

    def parts(self, device: torch.device) -> Parts:
        """All but the data is on `device`."""
        torch.manual_seed(0)
        data = synthetic(self.kind, self.samples, self.quick)
        model: nn.Module
        if self.kind == "regression":
            model = nn.Linear(10, 1).to(device)
            return Parts(model, nn.MSELoss(), torch.optim.Adam(model.parameters()), data)
        if self.kind == "gpt":
            with device:
                model = GPT(**(GPT_TINY if self.quick else GPT_124M))
            return Parts(
                model, NextToken(), torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), data
            )
        model = ResNet18(width=8 if self.quick else 64).to(
            device, memory_format=torch.channels_last
        )
        return Parts(
            model,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            data,
        )


@functools.lru_cache(maxsize=1)
def synthetic(kind: str, samples: int, quick: bool) -> TensorDataset:
    """The data of a task, drawn once for all its turns; nobody writes to it."""
    generator = torch.Generator().manual_seed(0)
    if kind == "regression":
        return TensorDataset(
            torch.rand(samples, 10, generator=generator),
            torch.rand(samples, 1, generator=generator),
        )
    if kind == "gpt":
        sizes = GPT_TINY if quick else GPT_124M
        tokens = torch.randint(
            sizes["vocab_size"], (samples, sizes["block_size"] + 1), generator=generator
        )
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    images = torch.randn(samples, 3, 32, 32, generator=generator)
    return TensorDataset(images, torch.randint(10, (samples,), generator=generator))


class Clock(Callback):
    """The seconds of each epoch, which all workers begin together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []

    def start(self) -> None:
        self._wait()
        if dist.get_world_size() > 1:
            dist.barrier()
        self.began = time.perf_counter()

    def stop(self) -> None:
        self._wait()
        self.seconds.append(time.perf_counter() - self.began)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def on_epoch_start(self, training: Any) -> None:
        self.start()

    def on_epoch_end(self, training: Any) -> None:
        self.stop()


def written_by_hand(compiled: bool) -> Callable[[Task, World, Clock], None]:
    def run(task: Task, world: World, clock: Clock) -> None:
        parts, device, several = task.parts(world.device), world.device, world.world_size > 1
        model: Any = torch.compile(parts.model) if compiled else parts.model
        if several:
            model = DistributedDataParallel(
                model, device_ids=[device.index] if device.type == "cuda" else None
            )
        batches = from_loader if task.kind == "regression" else on_device
        read = batches(task, parts.data, world)
        for epoch in range(task.epochs):
            clock.start()
            for inputs, targets in read(epoch):
                parts.optimizer.zero_grad()
                with torch.autocast(device.type, torch.bfloat16, enabled=task.narrow):
                    loss = parts.criterion(model(inputs), targets)
                loss.backward()
                parts.optimizer.step()
            clock.stop()

    return run


Batches = Callable[[int], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def from_loader(task: Task, data: TensorDataset, world: World) -> Batches:
    """As PyTorch's tutorial on DistributedDataParallel reads its data."""
    sampler: DistributedSampler[Any] | None = (
        DistributedSampler(data) if world.world_size > 1 else None
    )
    loader = DataLoader(data, batch_size=task.batch, shuffle=sampler is None, sampler=sampler)

    def read(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for inputs, targets in loader:
            yield inputs.to(world.device), targets.to(world.device)

    return read


def on_device(task: Task, data: TensorDataset, world: World) -> Batches:
    """The data set is kept on the device and each batch is taken by one index operation: as fast as
    it gets by hand."""
    inputs, targets = (tensor.to(world.device) for tensor in data.tensors)

    def read(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator(world.device).manual_seed(epoch)  # the same order on all ranks
        order = torch.randperm(task.samples, device=world.device, generator=generator)
        for wanted in order[world.rank :: world.world_size].split(task.batch):
            yield inputs[wanted], targets[wanted]

    return read


def ours(step: str) -> Callable[[Task, World, Clock], None]:
    def run(task: Task, world: World, clock: Clock) -> None:
        parts = task.parts(world.device)
        SupervisedRunner(device=world.device.type).train(
            model=parts.model,
            criterion=parts.criterion,
            optimizer=parts.optimizer,
            num_epochs=task.epochs,
            step=step,
            datasets={"batch_size": task.batch, "train": parts.data},
            precision="bf16" if task.narrow else "fp32",
            callbacks=[clock],
        )

    return run


def with_lightning(task: Task, world: World, clock: Clock) -> None:
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    parts = task.parts(world.device)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts.model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return parts.criterion(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return parts.optimizer

        def on_train_epoch_start(self) -> None:
            clock.start()

        def on_train_epoch_end(self) -> None:
            clock.stop()

    several = world.world_size > 1
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="gpu" if world.device.type == "cuda" else "cpu",
            devices=world.world_size,
            max_epochs=task.epochs,
            strategy="ddp" if several else "auto",
            plugins=[LightningEnvironment()] if several else None,
            default_root_dir=folder,
            logger=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            precision="bf16-mixed" if task.narrow else "32-true",
        )
        trainer.fit(Module(), DataLoader(parts.data, batch_size=task.batch, shuffle=True))
    check_world("Lightning", trainer.world_size, trainer.global_step // task.epochs, task, world)


def with_accelerate(task: Task, world: World, clock: Clock) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # The task before may have had another precision.
    AcceleratorState._reset_state(reset_partial_state=True)
    parts = task.parts(world.device)
    accelerator = Accelerator(
        cpu=world.device.type == "cpu", mixed_precision="bf16" if task.narrow else "no"
    )
    loader = DataLoader(parts.data, batch_size=task.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(parts.model, parts.optimizer, loader)
    check_world("Accelerate", accelerator.num_processes, len(loader), task, world)
    for _ in range(task.epochs):
        clock.start()
        for inputs, targets in loader:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = parts.criterion(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        clock.stop()


def check_world(name: str, processes: int, steps: int, task: Task, world: World) -> None:
    """Refuse the figure of a peer that trains alone beside the others, or another number of
    steps."""
    if (processes, steps) != (world.world_size, task.steps):
        raise RuntimeError(
            f"{name} sees {processes} processes and {steps} steps an epoch, not {world.world_size} "
            f"and {task.steps}"
        )


CONTENDERS: dict[str, Callable[[Task, World, Clock], None]] = {
    "ddp": written_by_hand(compiled=False),
    "ddp-compile": written_by_hand(compiled=True),
    "allhands-eager": ours("eager"),
    "allhands-graph": ours("graph"),
    "allhands-compile": ours("compile"),
    "lightning": with_lightning,
    "accelerate": with_accelerate,
}


def default_contenders(task: str) -> list[str]:
    """Compiling takes longer than all else together; it is for the task that takes long to run."""
    return [name for name in CONTENDERS if "compile" not in name or task.startswith("gpt")]


def alone() -> None:
    """Take from the environment what says that this process is one of several."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
