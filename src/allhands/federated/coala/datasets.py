"""Data sets of clients, under COALA's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from allhands.data import derive_seed
from allhands.errors import UserError, kind_of
from allhands.federated.clients import Clients
from allhands.federated.coala.config_sections import CoalaData
from allhands.federated.partitions import partition_of
from allhands.federated.samples import Samples, joined

_CPU = torch.device("cpu")
_SPLIT = ("split_type", "num_of_clients", "weights", "alpha", "min_size", "class_per_client")


class FederatedDataset:
    """Samples, and which client has which.

    Args:
        dataset: anything with indices and a length; a `TensorDataset` or a tuple of tensors is
            fastest.
        clients: who has which samples; None: not divided.

    Attributes:
        users: the clients' names; empty where it is not divided.
    """

    def __init__(self, dataset: Any, clients: Clients | None = None) -> None:
        self.dataset, self.clients = dataset, clients
        self.samples = Samples(dataset, _CPU)
        self._split: dict[str, Any] | None = None

    @property
    def users(self) -> list[str]:
        if self.clients is None:
            return []
        return [self.clients.name(client) for client in range(len(self.clients))]

    def size(self, cid: str | None = None) -> int:
        """Samples of a client, or of all."""
        return len(self.samples) if cid is None else len(self.indices(cid))

    def total_size(self) -> int:
        """Samples of all clients."""
        return len(self.samples)

    def indices(self, cid: str | None = None) -> torch.Tensor:
        """The indices of a client's samples, or of all: int64. Raises `UserError` for a client that
        is not in the data set."""
        if cid is None or self.clients is None:
            return torch.arange(len(self.samples))
        if not hasattr(self, "_number"):
            self._number = {name: number for number, name in enumerate(self.users)}
        if cid not in self._number:
            raise UserError(
                f"the data set has no client {cid!r}; there are {len(self._number)}, such as "
                f"{next(iter(self._number))!r}"
            )
        return self.clients.samples(self._number[cid])

    def loader(
        self,
        batch_size: int | None,
        client_id: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        transform: Any = None,
        drop_last: bool = False,
    ) -> Loader:
        """Batches of a client's samples, or of all, in another order each time that it is gone
        through.

        Args:
            batch_size: None: all samples in one batch.
            client_id: None: the samples of all.
            num_workers: has no effect; samples are read in this process.
            drop_last: leave out a last batch that is short.

        Raises:
            UserError: `transform` is given, or there is no such client.
        """
        if transform is not None:
            raise UserError(
                f"{type(self).__name__}.loader(transform=…): a data set has one; pass it to "
                "FederatedTensorDataset(…, transform=…)"
            )
        return Loader(
            self.samples,
            self.indices(client_id),
            batch_size,
            shuffle,
            (seed, "loader", str(client_id)),
            drop_last,
        )

    def to(self, device: torch.device) -> None:
        """Give batches on a device."""
        self.samples = Samples(self.dataset, device)

    def divide(self, seed: int) -> None:
        """Deal the samples out to clients if that was asked for and is not done."""
        if self.clients is None and self._split is not None:
            self.clients = divide(self.samples, seed=seed, **self._split)
            self.__dict__.pop("_number", None)


class Loader:
    """Batches by index; each time that it is gone through, in the order of a `seed` and the number
    of that time."""

    def __init__(
        self,
        samples: Samples,
        indices: torch.Tensor,
        batch_size: int | None,
        shuffle: bool,
        seed: tuple[Any, ...],
        drop_last: bool = False,
    ) -> None:
        self.samples, self.indices, self.shuffle, self.seed = samples, indices, shuffle, seed
        self.drop_last = drop_last
        self.batch_size = min(batch_size or len(indices), len(indices))
        self.passes = 0

    @property
    def dataset(self) -> torch.Tensor:
        """The samples' indices; their number is what scripts ask for."""
        return self.indices

    def __len__(self) -> int:
        full, rest = divmod(len(self.indices), max(self.batch_size, 1))
        return full + bool(rest and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        order, number = self.indices, self.passes
        self.passes += 1
        if self.shuffle:
            generator = torch.Generator().manual_seed(derive_seed(*self.seed, number))
            order = order[torch.randperm(len(order), generator=generator)]
        batches = order.split(max(self.batch_size, 1)) if len(order) else ()
        for step, batch in enumerate(batches[: len(self)]):
            yield self.samples.take(batch, self.seed[0], *self.seed[1:], number, step)


class FederatedTensorDataset(FederatedDataset):
    """Arrays in memory.

    Args:
        data: ``{"x": …, "y": …}``; or with ``simulated=True`` such a dict for each client by its
            name.
        transform, target_transform: called on each sample's input and target when it is read, with
            torch's, numpy's and random's generators seeded by the sample's place in the training.
        process_x, process_y: called on the whole arrays of a client once.
        simulated: the data are by client.
        do_simulate: deal the samples out, as the following say; False: they stay together, as for a
            test set.
        num_of_clients, simulation_method, weights, alpha, min_size, class_per_client: as in the
            configuration.

    Raises:
        UserError: the data have another form.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        process_x: Callable[[Any], Any] | None = None,
        process_y: Callable[[Any], Any] | None = None,
        simulated: bool = False,
        do_simulate: bool = True,
        num_of_clients: int = 10,
        simulation_method: str = "iid",
        weights: Sequence[float] | None = None,
        alpha: float = 0.5,
        min_size: int = 10,
        class_per_client: int = 1,
        data_wrapping: Any = None,
    ) -> None:
        if data_wrapping is not None:
            raise UserError(
                "FederatedTensorDataset(data_wrapping=…): samples are read by index here; pass "
                "transform=, or FederatedTorchDataset({client: data set, …})"
            )
        parts = dict(data) if simulated else {"": data}
        made = []
        for name, part in parts.items():
            if not isinstance(part, Mapping) or not {"x", "y"} <= part.keys():
                if simulated:
                    shape = "{client: {'x': …, 'y': …}}"
                else:
                    shape = "{'x': …, 'y': …}, or with simulated=True {client: …}"
                raise UserError(
                    f"FederatedTensorDataset: data must be {shape}; {name or 'data'} is "
                    f"{kind_of(part)}"
                )
            x, y = _tensor(part["x"], process_x), _tensor(part["y"], process_y)
            if len(x) != len(y):
                raise UserError(
                    f"FederatedTensorDataset: {len(x)} inputs and {len(y)} "
                    f"targets{f' of {name}' if name else ''}"
                )
            made.append((x, y))
        x, y = (torch.cat(column) for column in zip(*made, strict=True))
        dataset: Any = TensorDataset(x, y)
        if transform is not None or target_transform is not None:
            dataset = _Transformed(x, y, transform, target_transform)
        offsets = np.concatenate([[0], np.cumsum([len(part[0]) for part in made])])
        super().__init__(
            dataset,
            Clients.from_arrays(np.arange(len(x)), offsets, list(parts)) if simulated else None,
        )
        if do_simulate and not simulated:
            self.simulation(
                num_of_clients, simulation_method, weights, alpha, min_size, class_per_client
            )

    def simulation(
        self,
        num_of_clients: int,
        niid: str = "iid",
        weights: Sequence[float] | None = None,
        alpha: float = 0.5,
        min_size: int = 10,
        class_per_client: int = 1,
    ) -> None:
        """Say how the samples shall be dealt out; it is done when they are registered, by the
        configuration's seed. Raises `UserError` for data that are by client."""
        if self.clients is not None:
            raise UserError(
                "FederatedTensorDataset.simulation: the data are divided already; leave out "
                "simulated=True"
            )
        self._split = {
            "split_type": niid,
            "num_of_clients": num_of_clients,
            "weights": weights,
            "alpha": alpha,
            "min_size": min_size,
            "class_per_client": class_per_client,
        }


class FederatedTorchDataset(FederatedDataset):
    """Data sets of torch, one a client, or one that is not divided.

    Args:
        data: a data set for each client by its name; or one data set, as for a test set.
        users: the names to take, in this order; None: all.

    Raises:
        UserError: `users` names one that has no data set.
    """

    def __init__(
        self,
        data: Mapping[str, Dataset[Any]] | Dataset[Any],
        users: Sequence[str] | None = None,
        is_loaded: bool = False,
    ) -> None:
        if is_loaded:
            raise UserError(
                "FederatedTorchDataset(is_loaded=True): pass the data sets, not their loaders; the "
                "batches are client.batch_size's"
            )
        if not isinstance(data, Mapping):
            if users:
                raise UserError(
                    "FederatedTorchDataset: users needs data as {client: data set}; leave users out"
                )
            super().__init__(data)
            return
        names = list(users) if users else list(data)
        missing = [name for name in names if name not in data]
        if missing:
            raise UserError(
                f"FederatedTorchDataset: data has no client {missing[0]!r}; it has "
                f"{', '.join(map(str, list(data)[:5]))}"
            )
        parts: list[Any] = [data[name] for name in names]
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        super().__init__(joined(parts), Clients.from_arrays(np.arange(offsets[-1]), offsets, names))


class _Transformed(Dataset[Any]):
    def __init__(
        self, x: torch.Tensor, y: torch.Tensor, transform: Any, target_transform: Any
    ) -> None:
        self.x, self.targets, self.transform = x, y, transform
        self.target_transform = target_transform

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x, y = self.x[index], self.targets[index]
        return x if self.transform is None else self.transform(
            x
        ), y if self.target_transform is None else self.target_transform(y)


def as_federated(given: Any, what: str) -> FederatedDataset:
    """What was registered, as a `FederatedDataset`. Raises `UserError` with its kind for something
    that is none."""
    if isinstance(given, FederatedDataset):
        return given
    if isinstance(given, (type, Mapping, str)) or not (
        hasattr(given, "__getitem__") and hasattr(given, "__len__")
    ):
        shown = f"the class {given.__name__}" if isinstance(given, type) else kind_of(given)
        raise UserError(
            f"register_dataset: {what} is {shown}; pass a FederatedTensorDataset, a "
            "FederatedTorchDataset, or a data set with indices and a length"
        )
    return FederatedDataset(given)


def divide(
    samples: Samples,
    *,
    split_type: str,
    num_of_clients: int,
    weights: Sequence[float] | None,
    alpha: float,
    min_size: int,
    class_per_client: int,
    seed: int,
) -> Clients:
    """Deal samples out to clients called f0000000, f0000001, …"""
    partition: Any
    if split_type == "iid":
        partition = "iid" if weights is None else {"name": "quantity", "weights": list(weights)}
    elif split_type == "dir":
        partition = {"name": "dirichlet", "alpha": alpha, "min_size": min_size}
    elif split_type == "class":
        partition = {"name": "classes", "per_client": class_per_client}
    else:
        raise UserError(
            f"split_type: {split_type} needs data with a natural owner of each sample (mnist, "
            "shakespeare); write dir for clients that differ, or register_dataset with data by "
            "client"
        )
    made = partition_of(partition, samples, num_of_clients, seed)
    return Clients.from_arrays(
        made.indices.numpy(), made.offsets, [f"f{client:07d}" for client in range(len(made))]
    )


def split(train: FederatedDataset, data: CoalaData, seed: int) -> None:
    """Deal a data set out as the configuration says, unless it comes divided."""
    train.divide(seed)
    if train.clients is None:
        options = {name: getattr(data, name) for name in _SPLIT}
        train.clients = divide(train.samples, seed=seed, **options)


def _tensor(given: Any, process: Callable[[Any], Any] | None) -> torch.Tensor:
    if process is not None:
        given = process(given)
    return given if isinstance(given, torch.Tensor) else torch.as_tensor(np.asarray(given))
