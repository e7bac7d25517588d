"""The objects of a training, as both sides make them from a run file, and what cannot be trained
across sites."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from allhands.config import RunFile
from allhands.errors import UserError
from allhands.federated.algorithms.base import Algorithm
from allhands.federated.algorithms.baselines import Centralised
from allhands.federated.algorithms.fedbuff import FedBuff
from allhands.federated.algorithms.scaffold import Scaffold
from allhands.federated.rounds import Rounds
from allhands.federated.strategy import Federated


@dataclass
class Definition:
    """One training; nothing of it has touched data yet.

    Attributes:
        model, criterion, optimizer: the optimizer is over this model's parameters.
        scheduler: what `SupervisedRunner.train` takes.
        datasets: what `allhands.data.sources_from_datasets` takes; read where the samples are.
        strategy: rounds, algorithm, clients.
        runner: whose `handle_batch` calls the model.
        seed: decides all that is drawn.
        labels: names of the classes, in their order; None: not known.
        device: "cpu", "cuda", or None for a GPU where there is one.
        clip_norm, accumulate, precision, check, overfit: as `SupervisedRunner.train` takes them.
    """

    model: nn.Module
    criterion: Any
    optimizer: torch.optim.Optimizer
    datasets: dict[str, Any]
    strategy: Federated
    runner: Any
    seed: int = 42
    scheduler: Any = None
    labels: Sequence[str] | None = None
    device: str | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    precision: str = "fp32"
    check: bool = False
    overfit: bool = False

    def validate(self) -> None:
        """Raise `UserError` for the first setting that cannot be honoured across sites."""
        self.strategy.check_settings(
            SimpleNamespace(
                num_epochs=1,
                accumulate=self.accumulate,
                precision=self.precision,
                overfit=self.overfit,
                log_every=50,
                scheduler=self.scheduler,
                callbacks=[],
                step="eager",
                profile=None,
                activation_checkpointing=False,
                steps_per_epoch=None,
                max_steps=None,
                evaluate_every=None,
            )
        )
        check(self.strategy)


#: Makes the objects that a run file names.
Define = Callable[[RunFile], Definition]


def resolve(reference: str) -> Define:
    """The function that ``package.module:name`` names. It comes as a text, for it lives in a layer
    above this one."""
    module, _, name = reference.partition(":")
    found: Define = getattr(importlib.import_module(module), name)
    return found


def check(strategy: Federated) -> None:
    """Raise `UserError` for what a simulation can do and sites cannot; says what to write
    instead."""
    algorithm = strategy.algorithm
    if not algorithm.shares:
        raise UserError(
            f"algorithm={algorithm.name!r} shares nothing, so that there is nothing for a server "
            "to do; run it at each site with `allhands run`"
        )
    if isinstance(algorithm, Centralised):
        raise UserError(
            "algorithm='centralised' puts all samples together, which stay at their sites here; "
            "use 'fedavg'"
        )
    if isinstance(algorithm, FedBuff):
        raise UserError(
            "algorithm='fedbuff' goes by virtual time, and sites by rounds; use 'fedavg', and "
            "sites.round_timeout for sites that are slow"
        )
    if algorithm.needs_start_gradient:
        raise UserError(
            f"algorithm={algorithm.name!r} with option='I' needs a second vector of each client, "
            "and sites send one; write option='II'"
        )
    stateful = type(algorithm).client_state is not Algorithm.client_state
    if stateful and not isinstance(algorithm, Scaffold):
        raise UserError(
            f"algorithm={algorithm.name!r} keeps vectors with the clients in a way that sites do "
            "not know; use one of allhands' own algorithms"
        )
    if strategy.stages is not Rounds:
        raise UserError(
            f"stages={strategy.stages.__name__} changes the rounds of a simulation; leave it out "
            "across sites"
        )
    if strategy.systems is not None:
        raise UserError(
            "systems= are devices in virtual time, and sites are real; leave it out, and set "
            "sites.round_timeout"
        )
    if strategy.devices_per_client != 1:
        raise UserError(
            f"devices_per_client={strategy.devices_per_client} trains a client on several workers, "
            "and a site has one; leave it out"
        )
    executor = (
        strategy.executor if isinstance(strategy.executor, str) else strategy.executor["name"]
    )
    if executor not in ("auto", "serial"):
        raise UserError(
            f"executor={executor!r} trains several clients of one device together, and each site "
            "is one client; write executor='auto'"
        )
