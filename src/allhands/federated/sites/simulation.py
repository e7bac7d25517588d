"""A run across sites in one place, before it is run at the sites: the data of each site are those
of a client."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from allhands.data.build import Source, sources_from_datasets
from allhands.errors import UserError
from allhands.federated.clients import Clients
from allhands.federated.federated_settings import FederatedSettings
from allhands.federated.federated_training import Divided, test_source, train, trained_source
from allhands.federated.samples import Samples, joined
from allhands.federated.sites.definition import check
from allhands.federated.strategy import Federated


class SiteSamples(Dataset[Any]):
    """The samples of all sites: first those that are trained on, then those for tests.

    Args:
        parts: by site, the data set that it trains on and the one that it measures on, or None.

    Raises:
        UserError: a site has no sample to train on, or its samples are not like the first one's.
    """

    def __init__(self, parts: Mapping[str, tuple[Any, Any]]) -> None:
        names = list(parts)
        for name, (trained, _) in parts.items():
            if len(trained) == 0:
                raise UserError(f"the data of the site '{name}' have no sample to train on")
        _check_alike({name: trained[0] for name, (trained, _) in parts.items()})
        tested = [tests for _, tests in parts.values()]
        self.joined = joined(
            [trained for trained, _ in parts.values()]
            + [tests for tests in tested if tests is not None]
        )
        sizes = [len(trained) for trained, _ in parts.values()]
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        self.clients = Clients.from_arrays(np.arange(bounds[-1]), bounds, names)
        counts = [0 if tests is None else len(tests) for tests in tested]
        own = np.concatenate([[0], np.cumsum(counts)])
        self.tests = Clients.from_arrays(bounds[-1] + np.arange(own[-1]), own, names)

    def __len__(self) -> int:
        return len(self.joined)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.joined[index]


def _check_alike(samples: Mapping[str, Any]) -> None:
    """Raise `UserError` where tensors of two sites' samples have other shapes or types."""

    def form(sample: Any) -> Any:
        parts = sample if isinstance(sample, (tuple, list)) else [sample]
        return [
            f"{list(part.shape)} {str(part.dtype).removeprefix('torch.')}"
            for part in parts
            if isinstance(part, torch.Tensor)
        ]

    first = next(iter(samples))
    for name, sample in samples.items():
        if form(sample) != form(samples[first]):
            raise UserError(
                f"a sample of the site '{name}' is {', '.join(form(sample))}, and one of "
                f"'{first}' {', '.join(form(samples[first]))}; let them make the same"
            )


def data_of_sites(
    sites: Mapping[str, Mapping[str, Any]], run_seed: int, measured: bool
) -> dict[str, Any]:
    """What `get_datasets_fn` gives: all sites' data as one loader.

    Args:
        sites: by name, the ``datasets`` of the training at that site.
        run_seed: of the run, by which each site's data are made as at the site.
        measured: sites measure the model on data sets of their own.
    """
    parts: dict[str, tuple[Any, Any]] = {}
    first: Source | None = None
    for name, given in sites.items():
        try:
            sources = sources_from_datasets(given, run_seed)
            source, tests = trained_source(sources), test_source(sources) if measured else None
        except UserError as error:
            raise UserError(f"the data of the site '{name}': {error}") from None
        first = first or source
        if tests is not None and tests.options.get("collate_fn") is not source.options.get(
            "collate_fn"
        ):
            raise UserError(
                f"the data of the site '{name}': '{tests.name}' and '{source.name}' have a "
                "collate_fn each, and a simulation uses one for both; give them the same"
            )
        parts[name] = source.dataset, None if tests is None else tests.dataset
    assert first is not None
    kept = {"batch_size": first.batch_size, "drop_last": first.drop_last, **first.options}
    return {"train": {**kept, "dataset": SiteSamples(parts)}}


def divide_by_site(strategy: FederatedSettings, samples: Samples, seed: int) -> Divided:
    """Each site trains on its own samples, and measures on those that it holds out."""
    given: Any = samples.dataset
    samples = Samples(given.joined, samples.device, samples.collate_fn)
    if strategy.test_fraction is not None:
        return samples, *given.clients.split(strategy.test_fraction, seed)
    return samples, given.clients, given.tests if len(given.tests.indices) else None


def simulated_sites(strategy: Federated, names: Sequence[str]) -> Federated:
    """The same training with a client for each site, of the data that `data_of_sites` gives.

    Raises:
        UserError: something of it cannot be had across sites; says what to write instead.
    """
    check(strategy)
    if strategy.clients is not None and strategy.sites is not None:
        strategy.sites.check_clients(strategy.clients)
    made = copy.copy(strategy)
    made.clients = len(names)
    made.executor = "serial"  # as at a site
    made.train_instead = lambda: partial(train, divide=divide_by_site)  # type: ignore[method-assign]
    return made
