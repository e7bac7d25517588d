"""Convolutions of stacked clients, in forms that a GPU runs for all clients at once.

Stacked clients make a convolution one of as many groups as clients. cuDNN runs the forward pass of such a one group by group in
kernels that leave most of the device idle, and has no good kernels at all for few channels a group; in networks for colour images
that was more than half of a step. Its backward passes run all groups at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_FEW = 4  # input channels up to which the backward pass is a product too; fixed and not tried, so that runs repeat to the bit
#: Kinds of device on which it is faster.
DEVICES = {"cuda"}


class UnfoldedConv2d(nn.Conv2d):
    """`nn.Conv2d` for few input channels as one product of the weights with the image's patches, else as `_Grouped`."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        stride, padding, dilation = self.stride, self.padding, self.dilation
        if torch.is_autocast_enabled(input.device.type):  # at once, for the backward pass of `_Grouped` takes what was given
            narrow = torch.get_autocast_dtype(input.device.type)
            input, weight = _narrowed(input, narrow), _narrowed(weight, narrow)
            bias = None if bias is None else _narrowed(bias, narrow)
        if self.in_channels <= _FEW:
            made = product(input, weight, stride, padding, dilation)  # type: ignore[arg-type]
        else:
            made = _Grouped.apply(input, weight, stride, padding, dilation)
        return made if bias is None else made + bias[:, None, None]


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As autocast does it: float64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


class _Grouped(torch.autograd.Function):
    """Backward as `nn.Conv2d`. Forward by the same kernels where the stride is 1: a convolution is the transposed convolution
    with turned weights, which is what cuDNN computes by its backward pass. Else as a product."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any, dilation: Any) -> torch.Tensor:
        (rows, columns), (high, wide), (apart, beside) = weight.shape[2:], padding, dilation
        room = apart * (rows - 1) - high, beside * (columns - 1) - wide
        if stride != (1, 1) or min(room) < 0:
            return product(input, weight, stride, padding, dilation)
        return F.conv_transpose2d(input, weight.flip(2, 3).transpose(0, 1), None, 1, room, 0, 1, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        input, weight, ctx.stride, ctx.padding, ctx.dilation = inputs
        ctx.save_for_backward(input, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        by_input, by_weight, _ = torch.ops.aten.convolution_backward(
            gradient, input, weight, None, ctx.stride, ctx.padding, ctx.dilation, False, (0, 0), 1,
            (ctx.needs_input_grad[0], ctx.needs_input_grad[1], False),
        )  # fmt: skip
        return by_input, by_weight, None, None, None


def product(
    input: torch.Tensor, weight: torch.Tensor, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> torch.Tensor:
    """The convolution of images, N x channels_in x H x W, with a weight, channels_out x channels_in x rows x columns, as one
    batched product of the weight with the image's patches."""
    (rows, columns), (down, right), (apart, beside) = weight.shape[2:], stride, dilation
    x = F.pad(input, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else input
    high = (x.shape[2] - apart * (rows - 1) - 1) // down + 1
    wide = (x.shape[3] - beside * (columns - 1) - 1) // right + 1
    # Slices and not `F.unfold`, which launches a kernel for each image.
    tall, long = down * (high - 1) + 1, right * (wide - 1) + 1
    begins = [(i * apart, j * beside) for i in range(rows) for j in range(columns)]
    patches = torch.stack([x[:, :, i : i + tall : down, j : j + long : right] for i, j in begins], 2)
    # Not `@`, which would turn the patches and the result to fold the batch into one product.
    made = torch.bmm(weight.flatten(1).expand(len(x), -1, -1), patches.reshape(len(x), -1, high * wide))
    return made.view(len(x), -1, high, wide)


def unfold_convolutions(model: nn.Module) -> None:
    """Let the convolutions of `model` compute as `UnfoldedConv2d`; names and weights stay."""
    for module in model.modules():
        if type(module) is not nn.Conv2d or module.padding_mode != "zeros" or isinstance(module.padding, str):
            continue
        if module.groups == 1:
            module.__class__ = UnfoldedConv2d
