"""The workers of ddp, one after another in one process in plain PyTorch, with an exchange of
gradients that a test gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from allhands import SupervisedRunner
from tests.reference import global_batches
from tests.runner.problems import classification

SAMPLES, BATCH, ACCUMULATE, EPOCHS, CLIP = (
    50,
    4,
    2,
    3,
    0.4,
)  # with 3 workers, one has no sample in the last step of an epoch

Gradients = dict[str, torch.Tensor]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)


def train(
    strategy: Any, model: nn.Module | None = None, epochs: int = EPOCHS, **options: Any
) -> nn.Module:
    """By the package, in a world that is there already."""
    model = model or network()
    SupervisedRunner(device="cpu").train(
        model=model,
        optimizer=optimizer_of(model),
        num_epochs=epochs,
        distributed=strategy,
        loaders={"train": DataLoader(classification(SAMPLES), BATCH, shuffle=True)},
        verbose=False,
        **{"criterion": nn.CrossEntropyLoss(), "accumulate": ACCUMULATE, "clip_norm": CLIP}
        | options,
    )
    return model


def train_by_hand(workers: int, exchange: Callable[[list[Gradients]], Gradients]) -> nn.Module:
    """The same by hand.

    Args:
        exchange: the workers' gradients, each the sum over its samples of 1 / M times the sample's,
            where M samples are in the step, to their sum; not asked in steps in which a worker has
            no sample.
    """
    model = network()
    optimizer = optimizer_of(model)
    x, y = classification(SAMPLES).tensors
    size = BATCH * ACCUMULATE * workers
    batches = global_batches(SAMPLES, size, 42)
    for _ in range(EPOCHS * -(-SAMPLES // size)):
        rows = next(batches)
        gradients, shares = [], torch.tensor_split(rows, workers)
        for share in shares:
            model.zero_grad()
            for micro_batch in share.split(BATCH):
                if len(micro_batch):
                    weight = torch.tensor(len(micro_batch) / len(rows))
                    nn.functional.cross_entropy(model(x[micro_batch]), y[micro_batch]).backward(
                        weight
                    )
            gradients.append(
                {
                    name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                    for name, p in model.named_parameters()
                }
            )
        total = exchange(gradients) if all(map(len, shares)) else exact(gradients)
        for name, parameter in model.named_parameters():
            parameter.grad = total[name].clone()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model


def exact(gradients: list[Gradients]) -> Gradients:
    return {name: torch.stack([own[name] for own in gradients]).sum(0) for name in gradients[0]}


class Poisoned(nn.Module):
    """A criterion whose loss number `at`, from 1 on, is NaN on rank 1."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = nn.functional.cross_entropy(output, target)
        return loss * float("nan") if self.calls == self.at and dist.get_rank() == 1 else loss
