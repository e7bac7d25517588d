"""What the scripts of this folder share: scikit-learn's real 8x8 digits, and a LeNet for images of
that size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class LeNet(nn.Module):
    """Two convolutions and three linear layers; gives log-probabilities, as `F.nll_loss` wants
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 2 * 2, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images ``[batch, 1, 8, 8]`` to log-probabilities ``[batch, 10]``."""
        hidden = F.max_pool2d(F.relu(self.conv1(images)), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2).flatten(1)
        hidden = F.relu(self.fc2(F.relu(self.fc1(hidden))))
        return F.log_softmax(self.fc3(hidden), dim=1)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train on and the other 360."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    targets = torch.tensor(labels)
    return TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test])


def accuracy(model: nn.Module, test: TensorDataset, device: torch.device | str = "cpu") -> float:
    """The share of `test` that the model gets right."""
    images, targets = test.tensors
    model.eval()
    with torch.no_grad():
        return (model(images.to(device)).argmax(1) == targets.to(device)).double().mean().item()
