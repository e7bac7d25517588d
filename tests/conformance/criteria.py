"""The criteria and runners of the rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from allhands import SupervisedRunner
from tests.conformance import models

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1)


def counted_targets(output: Any, target: torch.Tensor) -> float:
    return float((target != -100).sum())


def counted_weights(output: Any, target: torch.Tensor) -> float:
    return float(CLASS_WEIGHTS[target[target != -100]].sum())


def structured_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    if isinstance(output, models.Output):
        logits, hidden = output.logits, output.hidden
    else:
        logits, hidden = output.values() if isinstance(output, dict) else output
    return F.cross_entropy(logits, target) + 0.01 * hidden.square().mean()


def token_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def token_sum_and_count(output: torch.Tensor, target: torch.Tensor) -> Any:
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total, (target != -100).sum()


def batch_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target, reduction="sum") * 0.1


def triplet(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    apart, same = torch.cdist(output, output), target[:, None] == target[None]
    return F.softplus(
        (apart * same).max(1).values - (apart + 1e3 * same).min(1).values + 0.5
    ).mean()


def dice(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    chance, truth = output.softmax(1), F.one_hot(target, 3)
    return 1 - (2 * (chance * truth).sum(0) / (chance.sum(0) + truth.sum(0))).mean()


def own_loss(output: Any, target: Any) -> torch.Tensor:
    return output["loss"]


class Distilled(nn.Module):
    """A criterion with a teacher of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(4)
        self.teacher = nn.Linear(3, 3)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, self.teacher(target).detach())


class GradientPenalty(SupervisedRunner):
    def handle_batch(self, model: nn.Module, batch: Any) -> Any:
        x = batch[0].clone().requires_grad_(True)
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return torch.cat([output, slope], 1), batch[1]


def penalized(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[:, :3], target) + 0.5 * output[:, 3:].square().sum(1).mean()


class Siamese(SupervisedRunner):
    def handle_batch(self, model: nn.Module, batch: Any) -> Any:
        return torch.cat([model(batch[0]), model(batch[0].flip(1))], 1), batch[1]


def both(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[:, :3], target) + F.mse_loss(output[:, 3:], target)


class PartsCalled(SupervisedRunner):
    def handle_batch(self, model: nn.Module, batch: Any) -> Any:
        return model.decode(torch.tanh(model.encode(batch[0]))), batch[1]


class WithLabels(SupervisedRunner):
    """Gives the labels to the model too, as transformers' models take them."""

    def handle_batch(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0], batch[1]), batch[1]
