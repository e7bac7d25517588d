"""Servers that die and are started again in the midst of a training, and stores that find them."""

from __future__ import annotations

from typing import Any

import torch

from allhands.kvstore.parameter_server import ParameterServer
from allhands.kvstore.rules import rules_of
from allhands.kvstore.served import ServedStore
from allhands.kvstore.store_modes import mode_named
from tests.kvstore.serving import TOKEN, Job, Weights

SHAPES = {f"k{number}": (50 + number * 1000, 3) for number in range(4)}


def training_data(steps: int) -> tuple[Weights, list[list[Weights]]]:
    """The first weights, and the gradients of two workers in each step."""
    draw = torch.Generator().manual_seed(5)
    first = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    grads = [
        [
            {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
            for _ in range(2)
        ]
        for _ in range(steps)
    ]
    return first, grads


def restart(made: Job, *numbers: int) -> None:
    """As if the processes had died and the launcher had started them again."""
    for number in numbers:
        made.servers[number].close()
    for number in numbers:
        again = ParameterServer(
            number,
            len(made.servers),
            made.workers,
            TOKEN.encode(),
            restarted=True,
            find=made.announced,
        )
        again.start()
        made.servers[number] = again
        made.where[number] = again.where()


def finding_store(
    made: Job, rank: int, transport: str = "auto", kind: str = "dist", **options: Any
) -> ServedStore:
    """A store of a job that asks where a server is that was started again."""
    mode = mode_named(kind)
    rules = rules_of(mode, options)
    where = list(made.where)
    store = ServedStore(mode, rank, made.workers, where, rules, 0, "one", transport, made.announced)
    made.stores.append(store)
    return store
