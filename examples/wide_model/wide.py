"""A model that one process cannot train within its memory, and four can.

    allhands launch -n 1 examples/wide_model/wide.py     ends: the model, its gradients and AdamW
    need 805 MB allhands launch -n 4 examples/wide_model/wide.py     trains: each worker holds a
    quarter of everything

Every worker may take 500 MB beyond what Python and PyTorch take themselves. The model is built on
the meta device, without weights; they are drawn layer by layer, and each worker keeps its quarter.
What was trained lies in the checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes
import resource
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allhands

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=2048, help="of each of the 12 layers")
parser.add_argument("--limit", type=int, default=500, help="MB that a worker may take")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--logdir", default="logs/wide_model")
options = parser.parse_args()

MB = 10**6


def memory(key: str) -> int:
    """A line of /proc/self/status in bytes: VmData, what the process has allocated, or VmRSS, VmHWM
    (its peak)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


world = allhands.init(device="cpu")
torch.set_num_threads(1)
from torch.distributed import checkpoint, fsdp  # noqa: E402, F401  their own memory does not count

# glibc's mallopt(M_MMAP_THRESHOLD): large blocks that were freed go back to the system, and are not
# kept for later.
ctypes.CDLL(None).mallopt(-3, 100_000)
before = memory("VmRSS")
allowed = memory("VmData") + options.limit * MB
resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.RLIM_INFINITY))

with torch.device("meta"):
    layers = [
        layer for _ in range(12) for layer in (nn.Linear(options.width, options.width), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.Linear(options.width, 10))
parameters = sum(p.numel() for p in model.parameters())
if world.is_main:
    print(
        f"{parameters:,} parameters: {16 * parameters / MB:.0f} MB with gradients and AdamW, "
        f"{options.limit} MB for each of {world.world_size}",
        flush=True,
    )

generator = torch.Generator().manual_seed(0)
samples = 16 * options.steps
inputs = torch.randn(samples, options.width, generator=generator)
data = TensorDataset(inputs, inputs[:, :10].argmax(1))
try:
    allhands.SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        datasets={"train": data, "batch_size": 16 // world.world_size},
        distributed="fsdp",
        logdir=options.logdir,
    )
except RuntimeError as error:
    raise SystemExit(
        f"rank {world.rank} has no memory left: {str(error).splitlines()[0]}"
    ) from None
print(f"rank {world.rank}: took {(memory('VmHWM') - before) / MB:.0f} MB at the most", flush=True)
