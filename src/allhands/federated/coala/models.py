"""The models that COALA's configuration names, made for the data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from allhands.errors import UserError, did_you_mean
from allhands.models import MLP, ResNet18, SimpleCNN

_NOT_HERE = ("alexnet", "digits5cnn", "resnet", "resnet50")


class LeNet(nn.Module):
    """LEAF's network for handwritten characters (Caldas et al., LEAF: A Benchmark for Federated
    Settings, 2018): two 5 x 5 convolutions with 32 and 64 channels, each with ReLU and 2 x 2
    pooling, then 2048 hidden units.

    Input N x in_channels x image_size x image_size, output N x num_classes.
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10, image_size: int = 28) -> None:
        super().__init__()
        if image_size < 4:
            raise UserError(
                f"lenet halves images twice and these have {image_size} pixels a side; write "
                "model: mlp"
            )
        self.conv1 = nn.Conv2d(in_channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.hidden = nn.Linear(64 * (image_size // 4) ** 2, 2048)
        self.head = nn.Linear(2048, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2):
            x = nn.functional.max_pool2d(conv(x).relu(), 2)
        return self.head(self.hidden(x.flatten(1)).relu())


class VGG9(nn.Module):
    """VGG with nine layers and no BatchNorm, as in Wang et al., Federated Learning with Matched
    Averaging, ICLR 2020.

    Input N x in_channels x image_size x image_size with at least 8 pixels a side, output N x
    num_classes.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10, image_size: int = 32) -> None:
        super().__init__()
        if image_size < 8:
            raise UserError(
                f"vgg9 halves images three times and these have {image_size} pixels a side; write "
                "model: mlp"
            )
        layers: list[nn.Module] = []
        before = in_channels
        for first, second in ((32, 64), (128, 128), (256, 256)):
            layers += [
                nn.Conv2d(before, first, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(first, second, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
            before = second
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(256 * (image_size // 8) ** 2, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(512, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class RNN(nn.Module):
    """LEAF's next-character model: 8 numbers a character, two LSTM layers of 256.

    Input N x length (int64), output N x num_classes: scores of the character that comes next.
    """

    def __init__(self, num_classes: int = 65) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(self.embedding(x))
        return self.head(out[:, -1])


_IMAGES: dict[str, Callable[..., nn.Module]] = {
    "lenet": LeNet,
    "simple_cnn": SimpleCNN,
    "vgg9": VGG9,
}
NAMES = (*_IMAGES, "resnet18", "rnn", "mlp")


def known(name: str) -> None:
    """Raise `UserError` for a model that is not here."""
    if name not in NAMES:
        hint = did_you_mean(name, NAMES)
        is_coala = " is a model of COALA that is not here" if name in _NOT_HERE else " is not known"
        raise UserError(
            f"model: {name!r}{is_coala}; there are {', '.join(NAMES)}, or call "
            f"register_model(YourModel){hint}"
        )


def build(name: str, sample: Tensor, num_classes: int) -> nn.Module:
    """The model of a name for inputs like `sample`, with weights from torch's global generator.

    Raises:
        UserError: no such model, or one that does not fit the data.
    """
    known(name)
    shape: Sequence[int] = sample.shape
    is_text = sample.dtype == torch.int64 and len(shape) == 1
    if name == "rnn":
        if not is_text:
            raise UserError(
                f"model: rnn reads characters, and a sample has shape {list(shape)}, "
                f"{sample.dtype}; write model: lenet"
            )
        return RNN(num_classes)
    if is_text:
        raise UserError(
            f"model: {name} reads images, and a sample is a line of {shape[0]} characters; write "
            "model: rnn"
        )
    if name == "mlp":
        return MLP(sample.numel(), out_features=num_classes)
    if len(shape) != 3 or shape[1] != shape[2]:
        raise UserError(
            f"model: {name} takes square images, and a sample has shape {list(shape)}; call "
            "register_model(YourModel)"
        )
    options: dict[str, Any] = {"in_channels": shape[0], "num_classes": num_classes}
    if name == "resnet18":
        return ResNet18(**options)
    return _IMAGES[name](**options, image_size=shape[1])
