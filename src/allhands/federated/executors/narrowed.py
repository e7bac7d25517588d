"""Autocast for operations that are batched over clients.

Under `torch.func.vmap` an operation is taken apart before autocast sees it: of a convolution there is then nothing left that
autocast would narrow, and a normalisation gets an input and weights of two formats. Products of matrices it still finds. So
what it no longer finds is brought to the format that it would have had on its own, where the model calls it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from allhands.step import Precision

_NARROW = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
_WIDE = {"batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm", "softmax", "log_softmax"}
_BACK = {"batch_norm", "instance_norm"}  # give the format of their input


def widened(values: Any) -> Any:
    """The bfloat16 tensors in any structure as float32."""
    return tree_map(lambda one: one.float() if isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16 else one, values)


def autocast(precision: Precision) -> AbstractContextManager[Any]:
    """The context in which a model and a criterion are called under `vmap`."""
    context = ExitStack()
    context.enter_context(precision.autocast())
    if precision.casts:
        context.enter_context(_Casts())
    return context


class _Casts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _NARROW:
            args, kwargs = tree_map(_narrow, (args, kwargs))
        elif name in _WIDE:
            given = args[0] if args else None
            args, kwargs = widened((args, kwargs))
            if name in _BACK and isinstance(given, torch.Tensor):
                return func(*args, **kwargs).to(given.dtype)
        return func(*args, **kwargs)


def _narrow(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value
