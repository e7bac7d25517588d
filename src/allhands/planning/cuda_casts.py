"""What autocast and dropout do on a GPU, for tensors without data that lie on a processor."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from allhands.compat import pytree

# Functions that autocast computes in fp32 on a GPU, and not on a processor (PyTorch's page on
# autocast, "CUDA ops that autocast to float32").
_IN_FP32 = frozenset(
    {
        F.layer_norm,
        F.group_norm,
        F.softmin,
        F.softplus,
        F.nll_loss,
        F.kl_div,
        F.l1_loss,
        F.mse_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.normalize,
        F.cosine_similarity,
        F.cosine_embedding_loss,
        F.hinge_embedding_loss,
        F.margin_ranking_loss,
        F.triplet_margin_loss,
        F.poisson_nll_loss,
        F.binary_cross_entropy_with_logits,
        torch.exp,
        torch.log,
        torch.pow,
        torch.norm,
        torch.rsqrt,
        torch.reciprocal,
        torch.Tensor.exp,
        torch.Tensor.log,
        torch.Tensor.pow,
        torch.Tensor.norm,
        torch.Tensor.rsqrt,
        torch.Tensor.reciprocal,
    }
)


# Those that read a narrow tensor there, and give fp32.
_TO_FP32 = frozenset(
    {
        F.softmax,
        F.log_softmax,
        torch.softmax,
        torch.log_softmax,
        torch.Tensor.softmax,
        torch.Tensor.log_softmax,
    }
)
_SEEN = _IN_FP32 | _TO_FP32 | {F.cross_entropy, F.dropout}


class _Widened(torch.autograd.Function):
    """A softmax or its logarithm in fp32 of a narrow tensor, without a copy of that in fp32."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(value, dtype=torch.float32)
        context.save_for_backward(result)
        context.dtype = value.dtype
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (result,) = context.saved_tensors
        return torch.empty_like(result, dtype=context.dtype)


class CudaCasts(TorchFunctionMode):
    """Within, functions of PyTorch keep for the backward pass what they keep on a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _SEEN:
            return function(*args, **kwargs)
        casts = torch.is_autocast_enabled("cpu")
        if casts and function in _TO_FP32 and _is_narrow(args[0]):
            return _Widened.apply(args[0])
        if casts and function is F.cross_entropy and _is_narrow(args[0]):
            args = _Widened.apply(args[0]), *args[1:]
            if (loss := _from_logarithms(*args, **kwargs)) is not None:
                return loss
        if casts and function in _IN_FP32:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _wide, (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)
        if function is F.dropout:
            return _dropout(*args, **kwargs)
        return function(*args, **kwargs)


def _is_narrow(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() < 4
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if _is_narrow(tensor) else tensor


def _from_logarithms(
    logarithms: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """The cross entropy of classes by number; None of any other."""
    old = size_average is not None or reduce is not None
    if target.is_floating_point() or label_smoothing or old:
        return None
    return F.nll_loss(logarithms, target, weight, ignore_index=ignore_index, reduction=reduction)


def _dropout(
    value: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or not p:
        return value
    return torch.native_dropout(value, p, True)[0]
