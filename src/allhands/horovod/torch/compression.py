"""Narrower numbers on the way."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """What `DistributedOptimizer(compression=…)` asks of a compressor; subclass it for one of your
    own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor that travels, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The inverse of `compress`, but for its rounding."""
        return tensor


class NoneCompressor(Compressor):
    """Tensors travel as they are."""


class _Cast(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if (
            not torch.is_tensor(tensor)
            or not tensor.is_floating_point()
            or tensor.dtype == cls.dtype
        ):
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor if context is None else tensor.to(context)


class FP16Compressor(_Cast):
    """Travels as fp16."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Travels as bf16."""

    dtype = torch.bfloat16


class Compression:
    """What an allreduce may do to floating-point tensors before they travel: `none`, `fp16`, and
    `bf16`, which Horovod lacks.

    Without error feedback. The range of fp16 ends at 65504; bf16 has the range of float32 and fewer
    digits.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
