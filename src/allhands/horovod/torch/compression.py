"""Narrower numbers on the way."""

from __future__ import annotations

from typing import Any

import torch


class _Cast:
    """Floating-point tensors travel as `dtype`; others as they are."""

    dtype: torch.dtype | None = None

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor that travels, and what `decompress` needs to know."""
        if (
            cls.dtype is None
            or not torch.is_tensor(tensor)
            or not tensor.is_floating_point()
            or tensor.dtype == cls.dtype
        ):
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The inverse of `compress`, but for its rounding."""
        return tensor if context is None else tensor.to(context)


class _FP16(_Cast):
    dtype = torch.float16


class _BF16(_Cast):
    dtype = torch.bfloat16


class Compression:
    """What an allreduce may do to floating-point tensors before they travel: `none`, `fp16`, and
    `bf16`, which Horovod lacks.

    Without error feedback. The range of fp16 ends at 65504; bf16 has the range of float32 and fewer
    digits.
    """

    none = _Cast
    fp16 = _FP16
    bf16 = _BF16
