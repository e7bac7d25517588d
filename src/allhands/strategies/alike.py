"""Keeping what should be the same on all ranks the same: buffers before they matter, a comparison
of weights, and all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from allhands.comm import all_gather_text, broadcast_tensors, mean_buffers
from allhands.compat import NormBase, gradient_hooks
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
        raise UserError(
            f"the job was started with --on-worker-failure {chosen}, but {why}, and cannot go on "
            f"without one; write --on-worker-failure stop, with --max-restarts 3{again}"
        )


def own_memory(model: nn.Module) -> None:
    """Give each element of a buffer memory of its own: one that was made by ``expand`` cannot be
    loaded or sent."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and any(
                not step and size > 1
                for step, size in zip(buffer.stride(), buffer.shape, strict=True)
            ):
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def make_buffers_equal(model: nn.Module, world: World) -> None:
    """Average the running statistics of BatchNorm over the ranks; other buffers become those of
    rank 0."""
    averaged, others = statistics_and_others(model)
    mean_buffers(averaged, world)
    broadcast_tensors(others, world)


def statistics_and_others(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The buffers that are running means and variances, and the others."""
    averaged = [
        buffer
        for module in model.modules()
        if isinstance(module, NormBase)
        and module.track_running_stats  # BatchNorm, SyncBatchNorm and InstanceNorm
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    ]
    averaged_ids = {id(buffer) for buffer in averaged}
    return averaged, [b for b in model.buffers() if id(b) not in averaged_ids]


def check_parameter_hooks(model: nn.Module, workers: int) -> None:
    """Raise `UserError` for a parameter with a hook of the user's: it would see the gradient of one
    rank's samples, or of one micro-batch's on one worker."""
    part, seen = (
        ("worker", "the exchanged ones with 'ddp'")
        if workers > 1
        else ("micro-batch", "those of the whole batch")
    )
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter):
            raise UserError(
                f"the parameter '{name}' has a hook on its gradient (register_hook, "
                f"register_post_accumulate_grad_hook), which would see that of one {part}'s "
                "samples, and not that of the whole batch. Remove the hook; clip_norm= bounds the "
                f"norm of all gradients, and optimizer.register_step_pre_hook sees {seen}"
            )


def check_buffers_equal(model: nn.Module, world: World, took_part: bool) -> None:
    """Raise `UserError` when a forward pass has written a buffer from the samples of its own rank.

    Args:
        model: after its first forward passes in training, which began with equal buffers. Where
            ranks hold parts of a model, buffers of the same name are compared.
        world: the ranks; all call it together.
        took_part: this rank had a sample.
    """
    averaged, _ = statistics_and_others(model)
    left_out = {id(buffer) for buffer in averaged}
    for module in model.modules():
        left_out |= {id(module._buffers[name]) for name in module._non_persistent_buffers_set}
    sums = (
        {
            name: int(bit_sum(b))
            for name, b in model.named_buffers()
            if id(b) not in left_out and b.numel()
        }
        if took_part
        else {}
    )
    found: dict[str, int] = {}
    for text in all_gather_text(json.dumps(sums), world):
        for name, value in json.loads(text).items():
            if found.setdefault(name, value) != value:
                raise UserError(
                    f"the forward pass writes the buffer '{name}' from the samples of its own "
                    "rank, so that it differs between the ranks after one step, and from what one "
                    "process would have. Add it up over the ranks in forward() "
                    "(torch.distributed.all_reduce), use BatchNorm, whose statistics are averaged, "
                    "or register it with persistent=False where it is no part of the model"
                )


def check_weights_equal(model: nn.Module, trained: Iterable[str], where: str) -> None:
    """Raise `WorldError` when the ranks' weights differ.

    Args:
        model: the bare module.
        trained: names of the parameters whose gradients are exchanged.
        where: at which step, for the message.
    """
    # The bits of each parameter, summed as integers: equal sums on all ranks mean equal weights for
    # any real fault.
    sums = torch.stack([bit_sum(p) for p in model.parameters()])
    smallest, largest = sums.clone(), sums.clone()
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    differ = (smallest != largest).tolist()
    if any(differ):
        names = [
            name for (name, _), bad in zip(model.named_parameters(), differ, strict=True) if bad
        ]
        if names[0] not in set(trained):
            raise WorldError(
                f"{where}: the ranks' weights differ in {len(names)} parameter(s), first "
                f"'{names[0]}', which was frozen (requires_grad=False) when the training began, so "
                "its gradients are not exchanged. Let it require gradients before train(), or "
                "train in two calls of train()"
            )
        raise WorldError(
            f"{where}: the ranks' weights differ in {len(names)} parameter(s), first '{names[0]}'. "
            "Their gradients were not exchanged: call the model itself in the forward pass (not an "
            "inner module or method of it), and change weights only in ways that are the same on "
            "every rank"
        )


def bit_sum(parameter: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits, as whole numbers of the size of its elements."""
    value = parameter.detach().contiguous()
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(
        value.element_size()
    )
    if value.is_complex() or whole is None:
        value, whole = torch.view_as_real(value).contiguous(), torch.int32
    return value.view(whole).sum(dtype=torch.int64)
