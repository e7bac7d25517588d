"""What gradients are narrowed to while they travel. Any class with these two methods may be passed
as ``compression=``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Passes tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what `decompress` needs to undo it."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The received tensor, widened again."""
        return tensor


class _Narrow(Compressor):
    """Casts floating-point tensors to a narrower dtype and back: no scaling, no error feedback."""

    dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        tensor = tf.convert_to_tensor(tensor)
        if not tensor.dtype.is_floating or tensor.dtype.size <= cls.dtype.size:
            return tensor, None
        return tf.cast(tensor, cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_Narrow):
    """float16 on the way. Gradients above 65504 become infinite."""

    dtype = tf.float16


class BF16Compressor(_Narrow):
    """bfloat16 on the way (Horovod has none): the range of float32, 8 bits of precision."""

    dtype = tf.bfloat16


class Compression:
    """What to write as ``compression=``: ``Compression.none``, ``Compression.fp16`` or
    ``Compression.bf16``."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
