"""Convolutions of images with few channels, as matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

_FEW = 4  # channels; a fixed rule and no trial, so that runs repeat to the bit
#: Kinds of device on which it is faster.
DEVICES = {"cuda"}


class UnfoldedConv2d(nn.Conv2d):
    """`nn.Conv2d` as one product of the weights with the image's patches.

    Stacked clients make a convolution one of as many groups as clients, and for few input channels a group cuDNN has only a slow
    kernel: in a network for colour images it took 43 % of a step.
    """

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        (rows, columns), (down, right), (apart, beside) = self.kernel_size, self.stride, self.dilation
        x = F.pad(input, (self.padding[1], self.padding[1], self.padding[0], self.padding[0])) if any(self.padding) else input  # type: ignore[arg-type]
        high = (x.shape[2] - apart * (rows - 1) - 1) // down + 1
        wide = (x.shape[3] - beside * (columns - 1) - 1) // right + 1
        # Slices and not `F.unfold`, which launches a kernel for each image.
        tall, long = down * (high - 1) + 1, right * (wide - 1) + 1
        begins = [(i * apart, j * beside) for i in range(rows) for j in range(columns)]
        patches = torch.stack([x[:, :, i : i + tall : down, j : j + long : right] for i, j in begins], 2)
        # Not `@`, which would turn the patches and the result to fold the batch into one product.
        made = torch.bmm(weight.flatten(1).expand(len(x), -1, -1), patches.reshape(len(x), -1, high * wide))
        if bias is not None:
            made = made + bias[:, None]
        return made.view(len(x), -1, high, wide)


def unfold_convolutions(model: nn.Module) -> None:
    """Let the convolutions of `model` that have few input channels compute as `UnfoldedConv2d`; names and weights stay."""
    for module in model.modules():
        if type(module) is not nn.Conv2d or module.padding_mode != "zeros" or isinstance(module.padding, str):
            continue
        if module.groups == 1 and module.in_channels <= _FEW:
            module.__class__ = UnfoldedConv2d
