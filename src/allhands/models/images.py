"""Small networks for small images, and a plain one for flat features."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from allhands.errors import UserError


class MLP(nn.Module):
    """Linear layers with ReLU between them. Input N x …, flattened to N x in_features; output N x
    out_features."""

    def __init__(
        self, in_features: int, hidden: Sequence[int] = (64,), out_features: int = 10
    ) -> None:
        super().__init__()
        sizes = [in_features, *hidden, out_features]
        check_positive(
            in_features=in_features,
            out_features=out_features,
            **{f"hidden[{i}]": h for i, h in enumerate(hidden)},
        )
        self.layers = nn.ModuleList(
            nn.Linear(before, after) for before, after in itertools.pairwise(sizes)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


class SimpleCNN(nn.Module):
    """Two or three blocks of 3 x 3 convolution, ReLU and 2 x 2 pooling, then a linear layer.

    Input N x in_channels x image_size x image_size, output N x num_classes. There is a third block
    from 16 pixels a side on, so that digits (8), MNIST (28) and CIFAR (32) end at 2, 3 and 4 pixels
    a side. It has no BatchNorm: its result does not depend on how a batch is cut.
    """

    def __init__(
        self, in_channels: int = 1, num_classes: int = 10, image_size: int = 8, width: int = 32
    ) -> None:
        super().__init__()
        check_positive(in_channels=in_channels, num_classes=num_classes, width=width)
        if image_size < 4:
            raise UserError(
                f"image_size={image_size} must be at least 4 pixels a side: the blocks halve it "
                "twice."
            )
        widths = [width, 2 * width] if image_size < 16 else [width, 2 * width, 4 * width]
        self.blocks = nn.ModuleList(
            nn.Conv2d(before, after, kernel_size=3, padding=1)
            for before, after in itertools.pairwise([in_channels, *widths])
        )
        self.pool = nn.MaxPool2d(2)
        side = image_size // 2 ** len(widths)
        self.head = nn.Linear(widths[-1] * side * side, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.pool(block(x).relu())
        return self.head(x.flatten(1))


def check_positive(**sizes: int) -> None:
    """`UserError` names the first size that is not at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name}={size} must be at least 1.")
