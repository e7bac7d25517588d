"""Trainings over the mpi backend against the hand-written loop, on data that no number of ranks
divides; part of mpi_probes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import DDP, SupervisedRunner
from tests.comm import mpi_probes
from tests.reference import global_batches, relative_difference, train_by_hand

SAMPLES, BATCH, STEPS = 53, 4, 12  # a global batch of 12 on 3 ranks, and a last one of 5


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randint(
        0, 4, (SAMPLES,), generator=generator
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def by_hand(size: int, steps: int) -> dict[str, torch.Tensor]:
    model = make_model()
    train_by_hand(
        model,
        nn.CrossEntropyLoss(),
        sgd(model),
        make_data(),
        global_batches(SAMPLES, size, 7),
        steps,
    )
    return model.state_dict()


def share(rows: torch.Tensor) -> torch.Tensor:
    """This rank's contiguous, possibly smaller or empty, part of a global batch."""
    return rows.tensor_split(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """What makes the mean over ranks of the gradients that of the whole global batch."""
    device = next(model.parameters()).device
    inputs, targets = (tensor.to(device) for tensor in make_data())
    mine = share(rows)
    loss = nn.functional.cross_entropy(model(inputs[mine]), targets[mine], reduction="sum")
    return loss / len(rows) * dist.get_world_size()


@mpi_probes.probe
def the_runner_trains_with_ddp_in_an_mpi_world() -> float:
    world = allhands.init(device="cpu")  # describes the group that there is
    assert (world.backend, world.world_size) == ("mpi", dist.get_world_size())
    model = make_model()
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        distributed=DDP(),
        num_epochs=2,
        seed=7,
        loaders={"train": DataLoader(TensorDataset(*make_data()), BATCH, shuffle=True)},
    )
    steps = 2 * -(-SAMPLES // (BATCH * world.world_size))
    difference = relative_difference(model.state_dict(), by_hand(BATCH * world.world_size, steps))
    assert difference < 1e-6, difference
    assert allhands.current_world() is world
    return difference


@mpi_probes.probe
def ddp_with_hooks_equals_the_loop() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    for hook in (None, default_hooks.allreduce_hook):
        wrapped = nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=1e-4)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        train(wrapped, sgd(wrapped))
        difference = relative_difference(wrapped.module.state_dict(), by_hand(13, STEPS))
        assert difference < 1e-6, (hook, difference)
    # A lossy hook whose callbacks wait for collectives of their own: it ends, and all ranks have
    # the same weights.
    wrapped = nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=1e-4)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(wrapped, sgd(wrapped))
    same_everywhere(wrapped.module)


@mpi_probes.probe
def fsdp2_equals_the_loop() -> None:
    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, sgd(model))
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}  # type: ignore[operator]
    difference = relative_difference(found, by_hand(13, STEPS))
    assert difference < 1e-6, difference


@mpi_probes.probe
def tensor_parallel_equals_one_process() -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(4)
    hidden = 6 * dist.get_world_size()
    model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 4))
    inputs, targets = make_data()
    expected = nn.functional.cross_entropy(model(inputs), targets)
    expected.backward()
    gradient = model[0].weight.grad
    model.zero_grad()
    split: Any = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    loss = nn.functional.cross_entropy(split(inputs), targets)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(split[0].weight.grad.full_tensor(), gradient)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batches = global_batches(SAMPLES, 13, 7)  # 13, then a last one of 1: some ranks have no sample
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, next(batches)).backward()
        optimizer.step()


def same_everywhere(model: nn.Module) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    lowest, highest = flat.clone(), flat.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest)
