"""A small training with Horovod's optimizer, each rank on its own batches, and the same by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import allhands.horovod.torch as hvd

Batch = tuple[torch.Tensor, torch.Tensor]


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def batches(rank: int) -> list[Batch]:
    """Rank r has 3 + 2 r batches, of different sizes."""
    made = torch.Generator().manual_seed(100 + rank)
    sizes = [4 + (rank + number) % 3 for number in range(3 + 2 * rank)]
    return [
        (torch.randn(size, 6, generator=made), torch.randint(3, (size,), generator=made))
        for size in sizes
    ]


def loss_of(net: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def optimizers(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def by_hand(size: int, kind: str, op: str) -> list[torch.Tensor]:
    """One process: each step adds up the gradients of the ranks that still have a batch."""
    net = model()
    optimizer = optimizers(kind, net)
    data = [batches(rank) for rank in range(size)]
    for step in range(max(map(len, data))):
        left = [own[step] for own in data if step < len(own)]
        divisor = {"Average": size, "ActiveAverage": len(left), "Sum": 1}[op]
        optimizer.zero_grad()
        for batch in left:
            (loss_of(net, batch) / divisor).backward()
        optimizer.step()
    return weights(net)


def train(kind: str, op: str, **options: Any) -> list[torch.Tensor]:
    rank = hvd.rank()
    net = model(seed=rank)  # rank 0's is what counts
    optimizer = optimizers(kind, net)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), op=op, **options
    )
    for batch in batches(rank):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
    last = hvd.join()
    # Those who joined early have stopped stepping.
    hvd.broadcast_parameters(net.state_dict(), root_rank=last)
    return weights(net)
