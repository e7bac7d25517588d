"""Data parallel training with nothing but send, recv and all_reduce.

Rank 0 sends its initial weights to the others; in every step each rank computes the gradients of
its share of the batch, and all of them apply the sum. After one epoch the weights are compared with
those of one process over the whole batches.

`python hand_synchronised.py` starts two processes. Under `allhands launch -n N`, torchrun or mpirun
it joins the ones that these have started.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lenet import LeNet, accuracy, digits
from torch import nn
from torch.utils.data import TensorDataset

import allhands
from allhands import utils

BATCH = 64


def sync_initial_weights(model: nn.Module, rank: int, world_size: int) -> None:
    """Give every rank the weights of rank 0."""
    for parameter in model.parameters():
        if rank == 0:
            for sibling in range(1, world_size):
                dist.send(parameter.data, dst=sibling)
        else:
            dist.recv(parameter.data, src=0)


def sync_gradients(model: nn.Module) -> None:
    """Replace each gradient by the sum over all ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


def batches(length: int, epochs: int) -> Iterator[torch.Tensor]:
    """Sample indices of every batch of the training, the same on all ranks; the last batch of an
    epoch is shorter."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        yield from torch.randperm(length, generator=generator).split(BATCH)


def train(model: nn.Module, data: TensorDataset, epochs: int, rank: int, world_size: int) -> None:
    """Train on this rank's share of every batch; with a world size of 1 that is all of it."""
    images, targets = (tensor.to(next(model.parameters()).device) for tensor in data.tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.85)
    model.train()
    for batch in batches(len(images), epochs):
        share = batch[rank::world_size].to(images.device)
        optimizer.zero_grad()
        # A sum over the share, divided by the size of the whole batch: shares of different sizes
        # then add up to the gradient of the mean over the batch. The mean over each share would
        # not.
        loss = F.nll_loss(model(images[share]), targets[share], reduction="sum") / len(batch)
        loss.backward()
        if world_size > 1:
            sync_gradients(model)
        optimizer.step()


def main() -> float:
    """Run by every rank; returns the accuracy."""
    world = allhands.init()
    data, test = digits()
    torch.manual_seed(world.rank)  # other initial weights on each rank
    model = LeNet().to(world.device)
    sync_initial_weights(model, world.rank, world.world_size)

    train(model, data, 1, world.rank, world.world_size)
    if world.rank == 0:
        torch.manual_seed(0)
        alone = LeNet().to(world.device)
        train(alone, data, 1, rank=0, world_size=1)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        difference = max((ours - its).abs().max().item() for ours, its in pairs)
        print(
            "after one epoch, largest difference to the weights of a single process: "
            f"{difference:.1e}",
            flush=True,
        )
        # Sums in another order are rounded differently, which any further training makes larger.
        assert difference < 1e-4, difference

    train(model, data, 19, world.rank, world.world_size)
    reached = accuracy(model, test, world.device)
    if world.rank == 0:
        print(f"after twenty, accuracy on {world.world_size} processes: {reached:.3f}", flush=True)
    assert reached > 0.9, reached
    return reached


utils.distributed_cmd_run(main, workers=2)
