"""What the GPU test of the mpi backend runs in each rank: tensors of CUDA, staged through pinned
memory.

mpiexec -n 2 python -m tests.comm.mpi_gpu_probes FOLDER
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import allhands  # noqa: F401
from tests.comm import mpi_probes, mpi_training
from tests.reference import relative_difference


def main(folder: str) -> None:
    dist.init_process_group("mpi", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    mpi_probes.RANK, mpi_probes.SIZE = rank, size
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    total = size * (size + 1) / 2

    def mine(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count,), rank + 1.0, device=device).to(dtype)

    # What was queued on the stream before the call is in what travels; what is queued after it sees
    # the result.
    big = torch.randn(2048, 2048, device=device)
    for _ in range(10):
        late = (big @ big).mean() * 0 + mine(1_000_003)
        dist.all_reduce(late)
        assert bool((late * 2 == 2 * total).all())
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        tensor = mine(5, dtype)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [total] * 5, (dtype, tensor)
    gaps = torch.zeros(4, 6, device=device)
    gaps.t()[::2] = rank + 1.0
    dist.all_reduce(gaps.t()[::2])
    assert gaps[:, ::2].unique().tolist() == [total]
    assert gaps[:, 1::2].unique().tolist() == [0.0]

    tensor = mine(3)
    dist.broadcast(tensor, 1)
    assert tensor.tolist() == [2.0] * 3
    out = torch.empty(size * 2, device=device)
    dist.all_gather_into_tensor(out, mine(2))
    assert out.tolist() == [r + 1.0 for r in range(size) for _ in range(2)]
    parts = [torch.empty(2, device=device) for _ in range(size)]
    dist.all_gather(parts, mine(2))
    assert [part.tolist() for part in parts] == [[r + 1.0] * 2 for r in range(size)]
    part = torch.empty(3, device=device)
    dist.reduce_scatter_tensor(part, mine(3 * size))
    assert part.tolist() == [total] * 3
    out = torch.empty(size, device=device)
    dist.all_to_all_single(out, torch.arange(size, device=device) + 10.0 * rank)
    assert out.tolist() == [10.0 * r + rank for r in range(size)]
    after, before = (rank + 1) % size, (rank - 1) % size
    request = dist.isend(mine(4), after)
    came = torch.empty(4, device=device)
    dist.recv(came, before)
    request.wait()
    assert came.tolist() == [before + 1.0] * 4

    tensor = mine(3)
    future = (
        dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] + 1)
    )
    assert future.wait().tolist() == [total + 1] * 3

    # Gradients overlap with the backward pass, on uneven data.
    wrapped = nn.parallel.DistributedDataParallel(
        mpi_training.make_model().to(device), device_ids=[0], bucket_cap_mb=1e-4
    )
    mpi_training.train(wrapped, mpi_training.sgd(wrapped))
    weights = {name: value.cpu() for name, value in wrapped.module.state_dict().items()}
    difference = relative_difference(weights, mpi_training.by_hand(13, mpi_training.STEPS))
    assert difference < 1e-5, difference
    Path(folder, f"{rank}.json").write_text(json.dumps({"ok": True, "device": str(came.device)}))


if __name__ == "__main__":
    main(sys.argv[1])
