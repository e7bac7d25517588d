"""Federated training written by hand, on plain dicts of tensors: what the algorithms are compared
with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from allhands.federated.rounds import Rounds
from tests.federated import simulating as sim

Weights = dict[str, torch.Tensor]
#: Several steps a client, different numbers of them, and short last batches.
LOCAL: dict[str, Any] = {"batch_size": 4, "epochs": 2}


def weights_of(made: Rounds) -> Weights:
    """A copy of the global model."""
    return {
        name: value.clone()
        for name, value in made.server.layout.state_dict(made.server.weights).items()
    }


def learn(
    weights: Weights,
    batches: Iterable[torch.Tensor],
    *,
    lr: float = 0.1,
    momentum: float = 0.0,
    nesterov: bool = False,
    correct: Callable[[Weights, Weights], Weights] | None = None,
) -> Weights:
    """SGD of one client; `correct` takes gradients and weights to other gradients."""
    (x, y), net, velocity = sim.data(), sim.model(), dict[str, torch.Tensor]()
    for batch in batches:
        leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
        loss = nn.functional.mse_loss(functional_call(net, leaves, x[batch]), y[batch])
        gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        if correct is not None:
            gradients = correct(gradients, weights)
        velocity = {n: momentum * velocity[n] + g if velocity else g for n, g in gradients.items()}
        steps = (
            {n: g + momentum * velocity[n] for n, g in gradients.items()} if nesterov else velocity
        )
        weights = {name: value - lr * steps[name] for name, value in weights.items()}
    return weights


def batches(made: Rounds, round_: int, client: int) -> list[torch.Tensor]:
    """The steps of a client in a round."""
    return list(
        made.work.local.batches(made.clients.samples(client), made.work.seed, round_, client)
    )


def mean(many: list[Weights], shares: Iterable[float]) -> Weights:
    """The mean, weighted by `shares` of any sum."""
    shares = list(shares)
    return {
        name: sum(share * one[name] for share, one in zip(shares, many, strict=True)) / sum(shares)
        for name in many[0]
    }


def minus(one: Weights, other: Weights) -> Weights:
    return {name: value - other[name] for name, value in one.items()}


def apart(made: Rounds, expected: Weights) -> float:
    """The largest difference between the global model and what is expected."""
    return max(
        float((value - expected[name]).abs().max()) for name, value in weights_of(made).items()
    )


def same(one: Rounds, other: Rounds) -> float:
    """The largest difference between two global models."""
    return float((one.server.weights - other.server.weights).abs().max())


def average(
    made: Rounds,
    number: int,
    learnt: Callable[[Weights, int, int], Weights],
    server: Callable[[Weights, Weights], Weights] | None = None,
    weighted: bool = True,
) -> Weights:
    """Rounds in which all clients' models are averaged; `server` takes the old model and the mean
    update to the new one."""
    weights, everyone = weights_of(made), range(len(made.clients))
    shares = [float(made.clients.size(client)) if weighted else 1.0 for client in everyone]
    for round_ in range(number):
        update = mean(
            [minus(learnt(weights, round_, client), weights) for client in everyone], shares
        )
        weights = (
            server(weights, update)
            if server
            else {name: value + update[name] for name, value in weights.items()}
        )
    return weights
