"""ResNet-18 for images of 32 x 32: the first layer keeps the size and nothing is pooled before the
first block."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from allhands.errors import UserError
from allhands.models.images import check_positive

_GROUPS = 32  # Wu and He, Group Normalization (2018)


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut. N x channels_in x S x S to N x channels_out x S/stride
    x S/stride."""

    def __init__(
        self, channels_in: int, channels_out: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = norm(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), norm(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y))
        return (y + self.shortcut(x)).relu()


class ResNet18(nn.Module):
    """He et al., Deep Residual Learning (2015), with 18 layers and a first layer for small images;
    11.2 million parameters.

    Input N x in_channels x 32 x 32 (any side that 8 divides will do), output N x num_classes.
    `norm` is "batch", or "group": BatchNorm's result depends on which samples share a worker's
    batch and its buffers differ between workers, GroupNorm's does not, which is why federated
    training prefers it.

    Raises `UserError` for another `norm`.
    """

    def __init__(
        self, num_classes: int = 10, norm: str = "batch", in_channels: int = 3, width: int = 64
    ) -> None:
        super().__init__()
        check_positive(num_classes=num_classes, in_channels=in_channels, width=width)
        if norm not in {"batch", "group"}:
            raise UserError(f"norm={norm!r} must be 'batch' or 'group'.")
        if norm == "group" and width % _GROUPS:
            raise UserError(f"width={width} must be a multiple of {_GROUPS} with norm='group'.")
        make_norm: Callable[[int], nn.Module] = nn.BatchNorm2d if norm == "batch" else group_norm
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.norm = make_norm(width)
        blocks, before = [], width
        for stage in range(4):
            after = width * 2**stage
            blocks += [
                Block(before, after, 1 if stage == 0 else 2, make_norm),
                Block(after, after, 1, make_norm),
            ]
            before = after
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with 32 groups, the number of its paper."""
    return nn.GroupNorm(_GROUPS, channels)
