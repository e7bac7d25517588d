"""A training step of Horovod's DistributedOptimizer on allhands beside torch's
DistributedDataParallel, in the same processes.

    python benchmarks/horovod.py [--workers 2] [--device cpu|cuda] [--batch 16] [--width 16] [--out
    NAME]

ResNet-18 on 32x32 images that were made once, SGD with momentum. The two take turns, a block of
steps each, so that a change of the machine's speed touches both; the ratio is the median over the
pairs of blocks. Milliseconds of rank 0's processor are written
as well: on a machine that is busy otherwise they say more. Rank 0 is where the ranks' calls are
matched. With --device cuda each
worker has a GPU of its own; --width 64 is the ResNet-18 that everybody means.
"""

from __future__ import annotations

import argparse
import inspect
import os
import time
from typing import Any

import torch
from report import machine, save_json, summarize
from torch.nn.parallel import DistributedDataParallel

import allhands.horovod.torch as hvd
from allhands import current_world
from allhands.launch import spawn
from allhands.models.resnet import ResNet18

# Statistics of BatchNorm stay each rank's own, as they do with the other. PyTorch 2.13 renamed the
# argument.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
OWN_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def contender(name: str, width: int, batch: int, device: torch.device) -> Any:
    """A function that makes one training step."""
    torch.manual_seed(0)
    model: Any = ResNet18(width=width).to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if name == "ddp":
        devices = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=devices, **OWN_BUFFERS)
    else:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    images, labels = (
        torch.randn(batch, 3, 32, 32, device=device),
        torch.randint(10, (batch,), device=device),
    )

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def measure(
    width: int, batch: int, steps: int, blocks: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds a step, and of them those of the processor, block by block, of both; in a
    worker."""
    hvd.init()
    world = current_world()
    assert world is not None
    contenders = {name: contender(name, width, batch, world.device) for name in ("ddp", "horovod")}
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for block in range(blocks + 1):  # the first one warms up
        for name in sorted(contenders, reverse=block % 2 == 1):
            hvd.barrier()
            began, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                contenders[name]()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            if block:
                wall[name].append(1000 * (time.perf_counter() - began) / steps)
                cpu[name].append(1000 * (time.process_time() - used) / steps)
    hvd.shutdown()
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--out", default="horovod")
    args = parser.parse_args()
    env = {"OMP_NUM_THREADS": "1"}
    if args.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif torch.cuda.device_count() < args.workers:
        raise SystemExit(
            f"--workers {args.workers} needs as many GPUs, and there are "
            f"{torch.cuda.device_count()}"
        )
    wall, cpu = spawn(
        measure, (args.width, args.batch, args.steps, args.blocks), workers=args.workers, env=env
    )[0]
    found = summarize(wall, "ddp")
    settings = {
        name: getattr(args, name)
        for name in ("workers", "device", "batch", "width", "steps", "blocks")
    }
    save_json(
        args.out,
        {
            "machine": machine(),
            **settings,
            "unit": "ms a step",
            **found,
            "processor": summarize(cpu, "ddp"),
        },
    )
    print(
        f"ddp {found['median']['ddp']:.2f} ms a step, horovod {found['median']['horovod']:.2f}: "
        f"{found['ratio']['horovod']:.3f}"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
