"""Convolutions of stacked clients, in forms that a GPU runs for all clients at once.

Stacked clients make a convolution one of as many groups as clients, for which cuDNN has kernels of
very different speed, and for some shapes runs the groups one by one. Where that is so, a
convolution is instead the product of each client's weights with the patches of its images
(Chellapilla et al., High Performance Convolutional Neural Networks for Document Processing, 2006).
Which form which shape takes is fixed and not tried, so that runs repeat to the bit; the limits are
from a table of both forms for the layers of ResNet-18 and of a small CNN, 50 clients with 10 images
each, on one H200 (``benchmarks/stacked_convolutions.py``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Pair = tuple[int, int]
_FEW = 32  # input channels up to which a product is faster for any size
# places of the output up to which it is, and up to which all images of a client are one matrix
_SMALL = 64
#: Kinds of device on which it is faster.
DEVICES = {"cuda"}


class UnfoldedConv2d(nn.Conv2d):
    """`nn.Conv2d` as a product where that is faster for stacked clients, else as cuDNN computes
    it."""

    def _conv_forward(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        # At once, for the backward passes take what was given.
        if torch.is_autocast_enabled(input.device.type):
            narrow = torch.get_autocast_dtype(input.device.type)
            input, weight = _narrow(input, narrow), _narrow(weight, narrow)
            bias = None if bias is None else _narrow(bias, narrow)
        given = _pair(self.stride), _pair(self.padding), _pair(self.dilation)
        places = _length(input, weight, given, 0) * _length(input, weight, given, 1)
        if (
            self.kernel_size == (1, 1)
            or given[0] != (1, 1)
            or self.in_channels <= _FEW
            or places <= _SMALL
        ):
            made = _Product.apply(input, weight, *given)[0]
        else:
            made = _Grouped.apply(input, weight, *given)
        return made if bias is None else made + bias[:, None, None]


def _pair(value: Any) -> Pair:
    return tuple(value)


def _narrow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As autocast does it: float64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _length(
    input: torch.Tensor, weight: torch.Tensor, given: tuple[Pair, Pair, Pair], axis: int
) -> int:
    """Rows (axis 0) or columns (1) of the output."""
    stride, padding, dilation = (pair[axis] for pair in given)
    return (
        input.shape[2 + axis] + 2 * padding - dilation * (weight.shape[2 + axis] - 1) - 1
    ) // stride + 1


def _by_input(
    gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> torch.Tensor:
    """The gradient for the input: with stride 1 the convolution of the output's with turned
    weights, for which cuDNN has faster kernels than for its own backward pass of many groups."""
    room = tuple(dilation[axis] * (weight.shape[2 + axis] - 1) - padding[axis] for axis in (0, 1))
    if stride == (1, 1) and min(room) >= 0:
        return F.conv2d(gradient, weight.flip(2, 3).transpose(0, 1), None, 1, room, dilation)
    return torch.ops.aten.convolution_backward(
        gradient,
        input,
        weight,
        None,
        stride,
        padding,
        dilation,
        False,
        (0, 0),
        1,
        (True, False, False),
    )[0]


class _Grouped(torch.autograd.Function):
    """cuDNN's convolution."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair, dilation: Pair
    ) -> torch.Tensor:
        return F.conv2d(input, weight, None, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        input, weight, ctx.stride, ctx.padding, ctx.dilation = inputs
        ctx.save_for_backward(input, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        given = ctx.stride, ctx.padding, ctx.dilation
        by_input = _by_input(gradient, input, weight, *given) if ctx.needs_input_grad[0] else None
        by_weight = None
        if ctx.needs_input_grad[1]:
            by_weight = torch.ops.aten.convolution_backward(
                gradient, input, weight, None, *given, False, (0, 0), 1, (False, True, False)
            )[1]
        return by_input, by_weight, None, None, None


class _Product(torch.autograd.Function):
    """The product of the weights with the image's patches, which are kept for the gradient of the
    weights.

    Images with few places in the output are one matrix for each client: ``[channels x rows x
    columns of the weight, images x places]``. Others keep a matrix each, which spares turning the
    output.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair, dilation: Pair
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given, images, numbers = (stride, padding, dilation), len(input), weight[0].numel()
        high, wide = (_length(input, weight, given, axis) for axis in (0, 1))
        seen = _patches(input, weight, given)  # images x channels x rows x columns x high x wide
        if high * wide <= _SMALL:
            patches = seen.permute(1, 2, 3, 0, 4, 5).reshape(numbers, images * high * wide)
            made = torch.mm(weight.flatten(1), patches)
            return made.view(-1, images, high, wide).transpose(0, 1).contiguous(), patches
        patches = seen.reshape(images, numbers, high * wide)
        # Not `@`, which would turn the patches and the result to fold the batch into one product.
        made = torch.bmm(weight.flatten(1).expand(images, -1, -1), patches)
        return made.view(images, -1, high, wide), patches

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        input, weight, ctx.stride, ctx.padding, ctx.dilation = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(input, weight, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        input, weight, patches = ctx.saved_tensors
        given = ctx.stride, ctx.padding, ctx.dilation
        small = gradient.shape[2] * gradient.shape[3] <= _SMALL
        turned = gradient.transpose(0, 1).flatten(1) if small else gradient.flatten(2)
        by_input = by_weight = None
        if ctx.needs_input_grad[0]:
            if small or weight.shape[2:] == (1, 1):
                factors = weight.flatten(1).t()
                if small:
                    by_patches = torch.mm(factors, turned)
                else:
                    by_patches = torch.bmm(factors.expand(len(input), -1, -1), turned)
                by_input = _fold(by_patches, small, input, weight, gradient.shape[2:], given)
            else:
                by_input = _by_input(gradient, input, weight, *given)
        if ctx.needs_input_grad[1]:
            if small:
                product = torch.mm(turned, patches.t())
            else:
                product = torch.bmm(turned, patches.transpose(1, 2)).sum(0)
            by_weight = product.view(weight.shape)
        return by_input, by_weight, None, None, None


def _patches(
    input: torch.Tensor, weight: torch.Tensor, given: tuple[Pair, Pair, Pair]
) -> torch.Tensor:
    """What the weight sees, images x channels x rows x columns x high x wide; a view of the image
    (of a padded one)."""
    (down, right), padding, (apart, beside) = given
    rows, columns = weight.shape[2:]
    x = F.pad(input, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else input
    seen = x.unfold(2, apart * (rows - 1) + 1, down).unfold(3, beside * (columns - 1) + 1, right)
    return seen[..., ::apart, ::beside].permute(0, 1, 4, 5, 2, 3)


def _fold(
    by_patches: torch.Tensor,
    small: bool,
    input: torch.Tensor,
    weight: torch.Tensor,
    places: torch.Size,
    given: tuple[Pair, Pair, Pair],
) -> torch.Tensor:
    """The gradient of an image from those of its patches, which overlap."""
    (down, right), padding, (apart, beside) = given
    (images, channels), (rows, columns), (high, wide) = input.shape[:2], weight.shape[2:], places
    if small:
        seen = by_patches.view(channels, rows, columns, images, high, wide).permute(
            3, 0, 1, 2, 4, 5
        )
    else:
        seen = by_patches.view(images, channels, rows, columns, high, wide)
    # `new_zeros`, which under `vmap` is one for each client, so that it can be added to.
    whole = by_patches.new_zeros(
        images, channels, input.shape[2] + 2 * padding[0], input.shape[3] + 2 * padding[1]
    )
    for i in range(rows):
        for j in range(columns):
            tall, long = down * (high - 1) + 1, right * (wide - 1) + 1
            whole[
                :, :, i * apart : i * apart + tall : down, j * beside : j * beside + long : right
            ] += seen[:, :, i, j]
    return whole[
        :, :, padding[0] : padding[0] + input.shape[2], padding[1] : padding[1] + input.shape[3]
    ]


def unfold_convolutions(model: nn.Module) -> None:
    """Let the convolutions of `model` compute as `UnfoldedConv2d`; names and weights stay."""
    for module in model.modules():
        if (
            type(module) is not nn.Conv2d
            or module.padding_mode != "zeros"
            or isinstance(module.padding, str)
        ):
            continue
        if module.groups == 1:
            module.__class__ = UnfoldedConv2d
