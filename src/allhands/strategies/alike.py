"""Keeping what should be the same on all ranks the same: buffers before they matter, a comparison of weights, and all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from allhands.comm import broadcast_tensors, mean_buffers
from allhands.errors import UserError, WorldError
from allhands.world import World


def refuse_going_on(why: str, again: str) -> None:
    """Raise `UserError` when the launcher was told to go on without a worker that is lost.

    Args:
        why: who cannot do so, and why, as the middle of a sentence.
        again: what to write beside ``--max-restarts 3``, and what that does.
    """
    chosen = os.environ.get("ALLHANDS_ON_WORKER_FAILURE", "stop")
    if chosen != "stop":
        raise UserError(f"the job was started with --on-worker-failure {chosen}, but {why}, and cannot go on without one; write "
                        f"--on-worker-failure stop, with --max-restarts 3{again}")  # fmt: skip


def make_buffers_equal(model: nn.Module, world: World) -> None:
    """Average the running statistics of BatchNorm over the ranks; other buffers become those of rank 0."""
    averaged, others = statistics_and_others(model)
    mean_buffers(averaged, world)
    broadcast_tensors(others, world)


def statistics_and_others(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The buffers that are running means and variances, and the others."""
    averaged = [
        buffer
        for module in model.modules()
        if isinstance(module, _NormBase) and module.track_running_stats  # BatchNorm, SyncBatchNorm and InstanceNorm
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    ]
    averaged_ids = {id(buffer) for buffer in averaged}
    return averaged, [b for b in model.buffers() if id(b) not in averaged_ids]


def check_weights_equal(model: nn.Module, trained: Iterable[str], where: str) -> None:
    """Raise `WorldError` when the ranks' weights differ.

    Args:
        model: the bare module.
        trained: names of the parameters whose gradients are exchanged.
        where: at which step, for the message.
    """
    # The bits of each parameter, summed as integers: equal sums on all ranks mean equal weights for any real fault.
    sums = torch.stack([bit_sum(p) for p in model.parameters()])
    smallest, largest = sums.clone(), sums.clone()
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    differ = (smallest != largest).tolist()
    if any(differ):
        names = [name for (name, _), bad in zip(model.named_parameters(), differ, strict=True) if bad]
        if names[0] not in set(trained):
            raise WorldError(
                f"{where}: the ranks' weights differ in {len(names)} parameter(s), first '{names[0]}', which was frozen "
                "(requires_grad=False) when the training began, so its gradients are not exchanged. Let it require gradients "
                "before train(), or train in two calls of train()"
            )
        raise WorldError(
            f"{where}: the ranks' weights differ in {len(names)} parameter(s), first '{names[0]}'. Their gradients were not "
            "exchanged: call the model itself in the forward pass (not an inner module or method of it), and change "
            "weights only in ways that are the same on every rank"
        )


def bit_sum(parameter: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits, as whole numbers of the size of its elements."""
    value = parameter.detach().contiguous()
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(value.element_size())
    if value.is_complex() or whole is None:
        value, whole = torch.view_as_real(value).contiguous(), torch.int32
    return value.view(whole).sum(dtype=torch.int64)
