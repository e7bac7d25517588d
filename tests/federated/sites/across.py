"""A small run across sites in memory, and the same run as a simulation."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from allhands.federated.clients import Clients
from allhands.federated.sites.definition import Definition
from allhands.federated.sites.site_training import Across, SiteRunner, across_sites
from allhands.federated.sites.site_worker import SiteWorker
from allhands.federated.strategy import Federated
from allhands.runner import SupervisedRunner
from tests.federated.sites.fake_grid import FakeGrid

SIZES = (10, 26, 18, 3)
NAMES = ("north", "east", "south", "west")
SEED = 42


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Points of three classes: inputs ``[samples, 6]``, targets ``[samples]``."""
    x = torch.randn(sum(SIZES), 6, generator=torch.Generator().manual_seed(1))
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


def rows(client: int) -> range:
    """The samples of a client."""
    bounds = [0, *itertools.accumulate(SIZES)]
    return range(bounds[client], bounds[client + 1])


def net(norm: bool = False) -> nn.Module:
    """The same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        inner = [nn.BatchNorm1d(9)] if norm else []
        return nn.Sequential(nn.Linear(6, 9), *inner, nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 3))


def _strategy(**options: Any) -> Federated:
    return Federated(**{"local_epochs": 2, "rounds": 3, **options})


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def site(
    client: int, folder: Path, norm: bool = False, scheduler: Any = None, **options: Any
) -> SiteWorker:
    """The side of one client, with its own samples only."""
    model = net(norm)
    optimizer = _optimizer(model)
    given = TensorDataset(*(part[list(rows(client))] for part in data()))
    definition = Definition(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        {"batch_size": 4, "train": given},
        _strategy(**options),
        SupervisedRunner(device="cpu"),
        seed=SEED,
        scheduler=None if scheduler is None else scheduler(optimizer),
    )
    return SiteWorker(definition, NAMES[client], folder / NAMES[client])


def grid(folder: Path, norm: bool = False, **options: Any) -> FakeGrid:
    """All four sites, connected as nodes 100 to 103."""
    made = FakeGrid()
    for client in range(len(NAMES)):
        made.add(100 + client, site(client, folder, norm, **options).handle)
    return made


def unread() -> dict[str, Any]:
    """The data sets of a server that has no data."""
    raise AssertionError("a server without data has read the data of the run file")


def serve(
    across: FakeGrid | Across,
    norm: bool = False,
    logdir: Path | None = None,
    sites: dict[str, Any] | None = None,
    resume: str | None = None,
    scheduler: Any = None,
    datasets: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """The server's side; returns the model and the history."""
    model = net(norm)
    across = Across(across) if isinstance(across, FakeGrid) else across
    strategy = across_sites(
        _strategy(
            sites={"names": NAMES, "wait": 5.0, "round_timeout": 20.0, **(sites or {})}, **options
        ),
        across,
    )
    optimizer, datasets = (
        _optimizer(model),
        datasets or {"batch_size": 4, "get_datasets_fn": unread},
    )
    history = SiteRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        datasets=datasets,
        scheduler=None if scheduler is None else scheduler(optimizer),
        distributed=strategy,
        seed=SEED,
        verbose=False,
        logdir=logdir,
        resume=resume,
    )
    return model, history


def simulate(
    norm: bool = False, scheduler: Any = None, **options: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """The same training in one process."""
    model = net(norm)
    parts = [list(rows(client)) for client in range(len(SIZES))]
    strategy = _strategy(partition=Clients(parts, NAMES[: len(parts)]), **options)
    optimizer = _optimizer(model)

    class Here(SupervisedRunner):
        _plan = SiteRunner._plan

    history = Here(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        datasets={"batch_size": 4, "train": TensorDataset(*data())},
        scheduler=None if scheduler is None else scheduler(optimizer),
        distributed=strategy,
        seed=SEED,
        verbose=False,
    )
    return model, history


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models are equal to the bit."""
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )
