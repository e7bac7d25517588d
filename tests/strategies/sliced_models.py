"""Models that tests slice, their data, and trainings of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Mesh, SupervisedRunner, Tensor
from allhands.models import GPT, MLP, NextToken

VOCAB, LENGTH, SAMPLES, BATCH = 37, 7, 23, 3
# 4 an epoch for one share of the samples, the last of 5 samples; 2 for two shares, the last of 11
STEPS = 20


def started(model: nn.Module) -> nn.Module:
    """Biases start at 0 and stay near it, so that their relative differences would be rounding
    alone; these do not."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def gpt(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return started(
        GPT(
            **(
                {"vocab_size": VOCAB, "block_size": LENGTH, "layers": 2, "heads": 12, "width": 24}
                | options
            )
        )
    )


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return started(MLP(4, (12, 24), 10))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=generator)
    y = x.roll(-1, 1).clone()
    y[:7, :4] = -100
    return x, y


def features() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 4, generator=generator), torch.randint(
        10, (SAMPLES,), generator=generator
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# name -> (strategy, workers that see samples of their own, model, data, criterion, optimizer)
TRAININGS: dict[str, tuple[Callable[[], Any], int, Any, Any, Any, Any]] = {
    "tensor 4": (Tensor, 1, gpt, tokens, NextToken(), sgd),
    "tensor 4, sequence and loss": (
        lambda: Tensor(sequence_parallel=True, loss_parallel=True),
        1,
        gpt,
        tokens,
        NextToken(weight=torch.linspace(0.5, 1.5, VOCAB), label_smoothing=0.1),
        sgd,
    ),
    "copies 2 x tensor 2": (
        lambda: Mesh(dp=2, tp=2),
        2,
        lambda: gpt(tied=False),
        tokens,
        NextToken(),
        sgd,
    ),
    "shards 2 x tensor 2": (lambda: Mesh(dp={"shard": 2}, tp=2), 2, gpt, tokens, NextToken(), sgd),
    "shards 2 x tensor 2, sequence and loss": (
        lambda: Mesh(
            dp={"shard": 2}, tp=2, tensor=Tensor(sequence_parallel=True, loss_parallel=True)
        ),
        2,
        gpt,
        tokens,
        NextToken(),
        sgd,
    ),
    "stages 2 x tensor 2, sequence and loss": (
        lambda: Mesh(pp=2, tp=2, tensor=Tensor(sequence_parallel=True, loss_parallel=True)),
        1,
        gpt,
        tokens,
        NextToken(),
        sgd,
    ),
    "mlp": (
        lambda: Mesh(dp=2, tp=2, tensor=Tensor(loss_parallel=True)),
        2,
        mlp,
        features,
        nn.CrossEntropyLoss(),
        adamw,
    ),
}


def train(
    name: str, epochs: int | None = None, strategy: Any = None, **options: Any
) -> tuple[dict[str, torch.Tensor], Any]:
    made, shares, make, data, criterion, optimizer = TRAININGS[name]
    model, samples = make(), TensorDataset(*data())
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=criterion,
        optimizer=optimizer(model),
        num_epochs=epochs or 5 * shares,
        accumulate=2,
        clip_norm=0.5,
        loaders={
            "train": DataLoader(samples, BATCH, shuffle=True),
            "valid": DataLoader(samples, 8),
        },
        metrics=["accuracy"] if make is mlp else [],
        distributed=strategy or made(),
        verbose=False,
        **options,
    )
    return model.state_dict(), {key: values[-1] for key, values in history["valid"].items()}
