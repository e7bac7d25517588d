"""Two processes: one sends a tensor, the other receives it.

`python send_recv.py` starts both. Under `allhands launch -n 2`, torchrun or mpirun it joins the
processes that these have started.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import allhands
from allhands import utils


def main() -> list[float]:
    """Run by both ranks; returns what this rank holds in the end."""
    world = allhands.init()
    assert world.world_size == 2, f"this example is for 2 processes, not {world.world_size}"
    if world.rank == 0:
        tensor = torch.tensor([1.0, -1.0], device=world.device)
        dist.send(tensor, dst=1)
        print(f"rank 0 has sent {tensor.tolist()} to rank 1", flush=True)
    else:
        tensor = torch.zeros(2, device=world.device)
        dist.recv(tensor, src=0)
        print(f"rank 1 has received {tensor.tolist()} from rank 0", flush=True)
    assert tensor.tolist() == [1.0, -1.0]
    dist.barrier()
    return tensor.tolist()


utils.distributed_cmd_run(main, workers=2)
