"""A model that computes in a narrower number format than its weights have.

The weights that the optimizer updates stay what they are. Each call of the model casts them, and
the gradients of the casts reach them in their own format (Micikevicius et al., Mixed Precision
Training, ICLR 2018, section 3.1). Unlike under autocast, all of the model computes in the narrower
format: activations between layers, norms and sums too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from allhands.compat import BatchNormBase, pytree
from allhands.errors import UserError
from allhands.step.modes import forwards_kept


@contextmanager
def cast_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within, calls of the model compute in `dtype`: floating-point inputs, weights and buffers are
    cast, but those of BatchNorm, whose running statistics need more digits.

    Raises:
        UserError: from a call: the model changes one of those buffers, and the change would be
            lost with the cast.
    """
    with forwards_kept([model]):
        model.forward = _CastForward(model, dtype)
        yield


class _CastForward:
    """A model's forward function, with cast weights."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._inner, self._dtype = _Inner(model), dtype
        kept = {
            id(tensor)
            for module in model.modules()
            if isinstance(module, BatchNormBase)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }
        self._parameters = [
            name
            for name, parameter in self._inner.named_parameters()
            if parameter.is_floating_point() and id(parameter) not in kept
        ]
        self._buffers = [
            name
            for name, buffer in self._inner.named_buffers()
            if buffer.is_floating_point() and id(buffer) not in kept
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner
        cast = {name: inner.get_parameter(name).to(self._dtype) for name in self._parameters}
        buffers = {name: inner.get_buffer(name).to(self._dtype) for name in self._buffers}
        before = [(name, buffer, buffer._version) for name, buffer in buffers.items()]
        given = cast | buffers
        args, kwargs = pytree.tree_map(self._cast, (args, kwargs))
        with torch.autocast(_device_type(cast), enabled=False):
            output = functional_call(inner, given, args, kwargs)
        for name, buffer, version in before:
            if given[name] is not buffer or buffer._version != version:
                raise UserError(
                    f"precision='bf16-true' and 'fp8': the model changes its buffer "
                    f"'{name.removeprefix('model.')}' in its forward pass, and computes with a "
                    "copy of it; write precision='bf16'"
                )
        return output

    def _cast(self, leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(self._dtype) if floating else leaf


def _device_type(tensors: dict[str, torch.Tensor]) -> str:
    return next((tensor.device.type for tensor in tensors.values()), "cpu")


class _Inner(nn.Module):
    """Calls the function that the model has had, past its hooks, which run around the cast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._forward = model.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)
