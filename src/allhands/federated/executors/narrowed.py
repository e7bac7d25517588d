"""Autocast for operations that are batched over clients.

Under `torch.func.vmap` an operation is taken apart before autocast sees it: of a convolution there
is then nothing left that autocast would narrow, and a normalisation gets an input and weights of
two formats. Products of matrices it still finds. So what it no longer finds is brought to the
format that it would have had on its own, where the model calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from allhands.compat import pytree
from allhands.step import Precision

_NARROW = {
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
}
_WIDE = {
    "batch_norm",
    "instance_norm",
    "layer_norm",
    "group_norm",
    "rms_norm",
    "softmax",
    "log_softmax",
}
_BACK = {"batch_norm", "instance_norm"}  # give the format of their input


def widened(values: Any) -> Any:
    return pytree.tree_map(
        lambda one: (
            one.float() if isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16 else one
        ),
        values,
    )


@contextmanager
def autocast(precision: Precision) -> Iterator[None]:
    """The context in which a model and a criterion are called under `vmap`."""
    if not precision.casts:
        yield
        return
    with precision.autocast(), _Casts():
        yield


class _Casts(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, name, first = kwargs or {}, getattr(func, "__name__", ""), args[0] if args else None
        # A model may switch autocast off for a part of itself.
        if not isinstance(first, torch.Tensor) or not torch.is_autocast_enabled(first.device.type):
            return func(*args, **kwargs)
        if name in _NARROW:
            args, kwargs = pytree.tree_map(_narrow, (args, kwargs))
        elif name in _WIDE:
            args, kwargs = widened((args, kwargs))
        made = func(*args, **kwargs)
        return made.to(first.dtype) if name in _BACK else made


def _narrow(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.bfloat16()
    return value
