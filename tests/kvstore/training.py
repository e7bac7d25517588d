"""One small training for the tests of stores: uneven shares, a short batch, a step without samples
for the last worker. And a net of one weight whose gradients are easy to tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch
from torch import nn

from allhands.kvstore import Trainer
from allhands.kvstore.store import KVStore

SIZES = [12, 11, 7, 2] * 5  # of the global batches of 20 steps
LOW_LR_FROM = 12  # the step from which the learning rate is a tenth

OPTIMIZERS: dict[
    str, tuple[str, dict[str, float], Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]]
] = {
    "sgd": ("sgd", {"learning_rate": 0.1}, lambda params: torch.optim.SGD(params, lr=0.1)),
    "momentum": (
        "sgd",
        {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3},
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    ),
    "adam": ("adam", {"learning_rate": 0.01}, lambda params: torch.optim.Adam(params, lr=0.01)),
    "adamw": ("adamw", {"learning_rate": 0.01}, lambda params: torch.optim.AdamW(params, lr=0.01)),
}


_ONE_AT_A_TIME = threading.Lock()  # workers are threads here, and draw from one generator


def model(seed: int = 0) -> nn.Module:
    with _ONE_AT_A_TIME:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    size = SIZES[step]
    return torch.randn(size, 5, generator=generator), torch.randn(size, 3, generator=generator)


def share(step: int, rank: int, workers: int) -> slice:
    """A worker's part of it: the first has half of the batch, the last ones may have nothing."""
    size, start, taken = SIZES[step], 0, 0
    for each in range(rank + 1):
        start += taken
        taken = size - start if each == workers - 1 else -(-(size - start) // 2)
    if SIZES[step] == 2 and workers > 1:  # two samples: both are the first worker's
        return slice(0, 2) if rank == 0 else slice(2, 2)
    return slice(start, start + taken)


def take_steps(
    net: nn.Module, trainer: Trainer, store: KVStore, steps: Iterable[int], two_calls: bool = False
) -> None:
    """This worker's part of some steps."""
    loss = nn.MSELoss(reduction="sum")
    device = next(net.parameters()).device
    for step in steps:
        if step == LOW_LR_FROM:
            trainer.set_learning_rate(trainer.learning_rate / 10)
        X, Y = (part[share(step, store.rank, store.num_workers)].to(device) for part in batch(step))
        if len(X):
            loss(net(X), Y).backward()
        if two_calls:
            trainer.allreduce_grads()
            trainer.update(len(X))
        else:
            trainer.step(len(X))


def by_hand(
    name: str, steps: Iterable[int] = range(20), clip_norm: float | None = None
) -> dict[str, torch.Tensor]:
    """The weights that one process without any store has in the end."""
    net = model()
    optimizer = OPTIMIZERS[name][2](net.parameters())
    for step in steps:
        if step == LOW_LR_FROM:
            optimizer.param_groups[0]["lr"] /= 10
        X, Y = batch(step)
        optimizer.zero_grad()
        (nn.MSELoss(reduction="sum")(net(X), Y) / len(X)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()
    return {key: value.detach() for key, value in net.state_dict().items()}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[key] - theirs[key]).abs().max()) for key in ours)


def line() -> nn.Linear:
    """y = 0 * x + 0."""
    net = nn.Linear(1, 1)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    return net


def backward(net: nn.Module, *values: float) -> None:
    """Gradients: of the weight the sum of the values, of the bias their number."""
    net(torch.tensor(values).view(-1, 1)).sum().backward()
