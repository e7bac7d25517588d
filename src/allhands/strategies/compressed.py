"""Gradients that travel in bf16 and are added up in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allhands.errors import UserError
from allhands.strategies.buckets import Bucket

COMPRESS = ("bf16", "powersgd")
# PyTorch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def sum_in_bf16(flat: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add a flat buffer of floating-point numbers up over the ranks, in place.

    Each rank gets its part of the buffer from all others in bf16, adds it up in fp32 (float64 stays so), and sends the sum to all
    in bf16: 2 (N - 1) / N times 2 bytes a number, half of what a ring sends in fp32. So a number is rounded twice, however many
    ranks there are, and the result is the same bits on all of them. (An all-reduce of bf16 would round at every addition.)

    All operations are in order with the current stream and none looks at a value, so that a CUDA graph can record them.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    length = -(-flat.numel() // size)
    message = nn.functional.pad(flat.to(torch.bfloat16), (0, size * length - flat.numel()))
    received = torch.empty_like(message)
    # As bytes: not every backend knows bf16.
    dist.all_to_all_single(received.view(torch.uint8), message.view(torch.uint8), group=group)
    own = received.view(size, length).sum(0, dtype=torch.promote_types(flat.dtype, torch.float32)).to(torch.bfloat16)
    _all_gather(received.view(torch.uint8), own.view(torch.uint8), group=group)
    flat.copy_(received[: flat.numel()])


def add_up_in_bf16(bucket: Bucket) -> None:
    """Add a bucket of gradients up over the ranks, by `sum_in_bf16`."""
    sum_in_bf16(bucket.flat)


def check_compress(compress: Any, powersgd_rank: Any, powersgd_start: Any, find_unused_parameters: bool) -> None:
    """Raise `UserError` for settings of ``DDP(compress=…)`` that there are not, or that do not go together."""
    if compress is not None and compress not in COMPRESS:
        raise UserError(
            f"DDP(compress={compress!r}); it must be 'bf16' or 'powersgd', or None, which exchanges gradients as they are. "
            "Set compress to 'bf16'"
        )
    for name, value, least, usual in (("powersgd_rank", powersgd_rank, 1, 1), ("powersgd_start", powersgd_start, 0, 10)):
        if value is None:
            continue
        if compress != "powersgd":
            raise UserError(f"DDP(compress={compress!r}, {name}={value!r}): only compress='powersgd' has it; leave {name} out")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"DDP({name}={value!r}); it must be a whole number, at least {least}, such as {name}={usual}")
    if compress == "powersgd" and find_unused_parameters:
        raise UserError(
            "DDP(compress='powersgd', find_unused_parameters=True): what compression has left over of a gradient is added to the "
            "next step's, in which the parameter may be unused; leave find_unused_parameters out, or set compress to 'bf16'"
        )


def check_compressible(compress: str, model: nn.Module, precision: str) -> None:
    """Raise `UserError` for a model or a training whose gradients cannot travel so."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UserError(
                f"DDP(compress={compress!r}): '{name}' has sparse gradients, which travel as they are; make it with "
                "sparse=False, or leave compress out"
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UserError(f"DDP(compress={compress!r}): '{name}' is {dtype}, which is not compressed; leave compress out")
    if compress == "powersgd" and precision == "fp16":
        raise UserError(
            "DDP(compress='powersgd') with precision='fp16': a gradient that overflows would stay in what compression keeps for "
            "the next step; write precision='bf16', or set compress to 'bf16'"
        )
