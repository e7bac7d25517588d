"""TensorFlow's tensors as torch's on the same memory, and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from allhands.errors import UserError

_BF16 = tf.bfloat16.as_numpy_dtype
_KNOWN = {
    tf.bool,
    tf.uint8,
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
}
# Moved as they are, these may travel under the signed type of the same width; a sum of them would
# not be one.
_UNSIGNED = {tf.uint16: np.int16, tf.uint32: np.int32, tf.uint64: np.int64}

with warnings.catch_warnings():
    # torch says once in a process that an array is not writable. The engine only reads what it is
    # given.
    warnings.simplefilter("ignore")
    _read_only = np.zeros(1)
    _read_only.flags.writeable = False
    torch.from_numpy(_read_only)


def to_torch(array: Any) -> torch.Tensor:
    """A torch tensor on the memory of a NumPy array, or of a copy where it is a scalar."""
    array = np.asarray(array)
    if array.dtype == _BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    signed = _UNSIGNED.get(tf.as_dtype(array.dtype))
    return torch.from_numpy(array if signed is None else array.view(signed))


def to_array(tensor: torch.Tensor, dtype: Any) -> Any:
    """A NumPy array of TensorFlow's `dtype` on the memory of a torch tensor."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BF16)
    array = tensor.numpy()
    return array.view(dtype.as_numpy_dtype) if dtype in _UNSIGNED else array


def to_arrays(result: Any, dtypes: Sequence[Any]) -> list[Any]:
    """`to_array` of each of an operation's results."""
    return [to_array(tensor, dtype) for tensor, dtype in zip(result, dtypes, strict=True)]


def check_dtype(dtype: Any, kind: str, name: str | None, reduces: bool) -> None:
    """Refuse a tensor that cannot be sent; `reduces` says whether the collective computes."""
    if dtype in _KNOWN or (dtype in _UNSIGNED and not reduces):
        return
    what = f"{kind} of {name!r}" if name else kind
    known = ", ".join(sorted(known.name for known in _KNOWN))
    raise UserError(f"{what}: the tensor is {dtype.name}; cast it to one of {known}")
