"""The training of three workers whose members change, and what it comes to by hand."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from allhands.comm.clipping import clip_factor
from allhands.kvstore.served import ServedStore
from allhands.kvstore.store import Share, Step
from tests.kvstore.serving import Job

LEASE = 2.5  # a worker gives a sign of life every second
SIZES = {"a": 1000, "b": 80_000}  # on two servers, in several chunks
WEIGHTS = (1.0, 5.0, 3.0)
LOST_AT = 2
STEPS = 5
Values = dict[str, torch.Tensor]


def first(sizes: Mapping[str, int] = SIZES) -> Values:
    return {name: torch.arange(count, dtype=torch.float32) for name, count in sizes.items()}


def gradients(rank: int, step: int, sizes: Mapping[str, int] = SIZES) -> Values:
    return {
        name: torch.arange(count) % 7 + float((rank + 1) * (step + 1))
        for name, count in sizes.items()
    }


def reference(
    took_part: list[set[int]],
    clip: float | None = None,
    sizes: Mapping[str, int] = SIZES,
    shares: Sequence[float] = WEIGHTS,
) -> Values:
    """SGD with rate 0.5, by hand; who was in each step, and how much each worker counts."""
    weights = first(sizes)
    for step, ranks in enumerate(took_part):
        total = {name: torch.zeros(count) for name, count in sizes.items()}
        for rank in sorted(ranks):
            for name, grad in gradients(rank, step, sizes).items():
                total[name] += grad
        factor = 1.0 / sum(shares[rank] for rank in ranks)
        for value in total.values():
            value.mul_(factor)
        if clip is not None:
            squares = sum(float(value.double().square().sum()) for value in total.values())
            for value in total.values():
                value.mul_(clip_factor(squares, clip))
        for name, value in total.items():
            weights[name] -= 0.5 * value
    return weights


def member(made: Job, rank: int, **options: Any) -> ServedStore:
    store = made.store(rank, **{"on_worker_loss": "continue", **options})
    store.set_optimizer("sgd", {"lr": 0.5})
    store.declare(first(), complete=True)
    return store


def update(store: ServedStore, outs: Values, step: int, clip: float | None = None) -> Step:
    return store.update(
        gradients(store.rank, step), outs, Share(WEIGHTS[store.rank], 1.0), clip_norm=clip
    )


def crash(store: ServedStore) -> None:
    """What the servers see when its process is killed."""
    store._closed = True
    for link in store.links:
        link._closing = True
        for side in (link._up, link._down):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
