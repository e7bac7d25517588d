"""The same small training by several executors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allhands.federated.algorithms import FedAvg, Trained
from allhands.federated.algorithms.base import Server
from allhands.models import RandomCrop, RandomFlip
from tests.federated import simulating as sim

SIZES = (10, 25, 17, 3, 8)
CHUNKS = [{"name": "stacked", "chunk": 1}, {"name": "stacked", "chunk": 3}, "stacked"]


def images(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Images 2 x 6 x 6 of three classes for all clients."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES), 2, 6, 6, generator=drawn, dtype=dtype)
    return x, torch.randint(3, (sum(SIZES),), generator=drawn)


def network(norm: str = "none", drop: float = 0.3, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small convolutional network, the same at every call."""
    made = {"batch": nn.BatchNorm2d(4), "group": nn.GroupNorm(2, 4), "none": nn.Identity()}[norm]
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        made,
        nn.Tanh(),
        nn.Dropout2d(drop),
        nn.Flatten(),
        nn.Dropout(drop),
        nn.Linear(64, 3),
    )
    drawn = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=drawn) / parameter[0].numel() ** 0.5
                )
        net[6].bias.zero_()
    return net.to(dtype)


def augmented(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The small network with dropout behind crops of both kinds and flips."""
    return nn.Sequential(
        RandomCrop(2), RandomFlip(), RandomCrop(1, mode="constant"), network("group", dtype=dtype)
    )


class Pulled(FedAvg):
    """Corrects gradients by what each client keeps, and keeps something of each round; weights by
    the loss at the start."""

    corrects = True
    needs_start_loss = True

    def client_state(self, server: Server) -> dict[str, int]:
        return {"drift": server.layout.trained}

    def correct(
        self,
        gradients: torch.Tensor,
        weights: torch.Tensor,
        start: torch.Tensor,
        own: dict[str, torch.Tensor],
    ) -> None:
        gradients.add_(weights - start, alpha=0.1).sub_(own["drift"], alpha=0.05)

    def contribute(self, trained: Trained, server: Server, sums: Any) -> None:
        trained.own["drift"].mul_(0.5).add_(trained.updates[:, : server.layout.trained])
        super().contribute(trained, server, sums)

    def weights(self, trained: Trained) -> torch.Tensor:
        assert trained.start_loss is not None
        return trained.samples * trained.start_loss.cpu()


def trained(
    executor: Any,
    *,
    norm: str = "none",
    drop: float = 0.3,
    dtype: torch.dtype = torch.float64,
    algorithm: Any = None,
    net: nn.Module | None = None,
    **options: Any,
) -> tuple[torch.Tensor, list[float]]:
    """The global weights and the losses of two rounds."""
    options.setdefault("criterion", nn.CrossEntropyLoss())
    options.setdefault("number", 2)
    made = sim.rounds(
        algorithm,
        net=net or network(norm, drop, dtype),
        given=images(dtype),
        who=sim.clients(SIZES),
        executor=executor,
        **options,
    )
    history = made.run()
    return made.server.weights, history["train"]["loss"]


def difference(executors: list[Any], **options: Any) -> float:
    """The largest difference of weights and losses from the first executor's, relative to the
    largest of each."""
    net = options.pop("net", lambda: None)
    (weights, losses), *others = [trained(executor, net=net(), **options) for executor in executors]
    assert bool(weights.isfinite().all())
    found = 0.0
    for other, loss in others:
        found = max(found, float((other - weights).abs().max() / weights.abs().max()))
        found = max(found, *(abs(a - b) / abs(b) for a, b in zip(loss, losses, strict=True)))
    return found
