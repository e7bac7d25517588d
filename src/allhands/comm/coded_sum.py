"""The sum of what all ranks send in a codec."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from allhands.comm.codecs import Codec


def part_length(numbers: int, ranks: int) -> int:
    """How many of a vector's numbers each rank adds up; the last ranks may have fewer."""
    return -(-numbers // ranks)


def pack(values: torch.Tensor, head: torch.Tensor, codec: Codec, length: int) -> torch.Tensor:
    """A message of `values`: 8 bytes for a number, then what the codec writes, then zeros.

    Args:
        values: 1-D, at most `length` numbers.
        head: the number, one float64 on the device of `values`.
        codec: how.
        length: all messages of so many numbers or fewer have one size, which is a multiple of 8.
    """
    message = torch.cat([head.view(1).view(torch.uint8), codec.encode(values)])
    return nn.functional.pad(message, (0, 8 - (-codec.nbytes(length) // 8) * 8 - len(message)))


def unpack(message: torch.Tensor, count: int, dtype: torch.dtype, codec: Codec) -> torch.Tensor:
    """The numbers that `pack` has written."""
    out = torch.empty(count, dtype=dtype, device=message.device)
    codec.decode(message[8 : 8 + codec.nbytes(count)], out)
    return out


def exchange(
    values: torch.Tensor,
    weight: float,
    codec: Codec,
    back: Codec,
    owed: torch.Tensor | None = None,
    mean: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """The sum of vectors over the ranks, of which every part travels encoded, twice.

    Each rank gets its part of the vector from all others, adds the parts up, and sends that to all.

    Args:
        values: this rank's vector, of floating-point numbers.
        weight: by what the vector is multiplied in the sum. The sum is NaN where a number is not
            finite, which not every codec could say.
        codec, back: how vectors travel, and how the sum comes back.
        owed: what this rank's part of the last sum has lost on its way; it is added to this one.
            None is nothing.
        mean: divide by the sum of the weights (0 where that is 0).

    Returns:
        The sum, the same bits on all ranks; what this rank's vector has lost; what its part of the
        sum has lost; and the bytes that it has sent.
    """
    size, rank, dtype = dist.get_world_size(), dist.get_rank(), values.dtype
    length = part_length(len(values), size)
    parts = [values[number * length : (number + 1) * length] for number in range(size)]
    weighs = _zero_or_nan(values) + weight
    message = torch.stack([pack(part, weighs, codec, length) for part in parts])
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message)
    weights = torch.cat([_head(row) for row in received])
    if mean:
        weights = weights / torch.where(weights.sum() > 0, weights.sum(), 1.0)
    total = torch.zeros_like(parts[rank]) if owed is None else owed.clone()
    for factor, row in zip(weights, received, strict=True):
        total += unpack(row, len(total), dtype, codec) * factor.to(dtype)
    reply = pack(total, _zero_or_nan(total), back, length)
    replies = [torch.empty_like(reply) for _ in range(size)]
    dist.all_gather(replies, reply)
    whole = torch.cat(
        [
            unpack(row, len(part), dtype, back) + _head(row).to(dtype)
            for row, part in zip(replies, parts, strict=True)
        ]
    )
    arrived = torch.cat(
        [unpack(row, len(part), dtype, codec) for row, part in zip(message, parts, strict=True)]
    )
    lost = total - unpack(reply, len(total), dtype, back)
    return whole, values - arrived, lost, (size - 1) * (message[0].nbytes + reply.nbytes)


def _head(message: torch.Tensor) -> torch.Tensor:
    """The number before what `pack` has encoded, shape [1]."""
    return message[:8].view(torch.float64)


def _zero_or_nan(values: torch.Tensor) -> torch.Tensor:
    """0 in float64, or NaN where a number is not finite; nothing waits for the device."""
    return values.mul(0).sum(dtype=torch.float64)
