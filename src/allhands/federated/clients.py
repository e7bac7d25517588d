"""Who holds which samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from allhands.data import derive_seed
from allhands.errors import UserError
from allhands.split_mix import mixed_array


class Clients:
    """The samples of every client, as two arrays: 100,000 clients cost 100,000 numbers and no
    objects.

    Args:
        parts: the indices of each client's samples into the data set.
        names: a name for each client; None: their numbers.

    Raises:
        UserError: no client, or two names that are the same.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[int] | np.ndarray | torch.Tensor],
        names: Sequence[str] | None = None,
    ) -> None:
        if len(parts) == 0:
            raise UserError("the partition has no client; give at least one")
        sizes = np.fromiter((len(part) for part in parts), dtype=np.int64, count=len(parts))
        self.offsets = np.concatenate([[0], np.cumsum(sizes)])
        flat = [np.asarray(part, dtype=np.int64) for part in parts if len(part)]
        self.indices = torch.from_numpy(
            np.concatenate(flat) if flat else np.zeros(0, dtype=np.int64)
        )
        self._set_names(names)

    @classmethod
    def from_arrays(
        cls, indices: np.ndarray, offsets: np.ndarray, names: Sequence[str] | None = None
    ) -> Clients:
        """From the samples of all clients in one array (int64) and where each client's begin, shape
        ``[clients + 1]``."""
        made = cls.__new__(cls)
        made.indices = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
        made.offsets = np.asarray(offsets)
        made._set_names(names)
        return made

    def _set_names(self, names: Sequence[str] | None) -> None:
        self.names = None if names is None else [str(name) for name in names]
        if self.names is None:
            return
        if len(self.names) != len(self):
            raise UserError(
                f"{len(self.names)} names for {len(self)} clients; give one name a client"
            )
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise UserError(f"two clients are called {twice!r}; give each a name of its own")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def size(self, client: int) -> int:
        """Samples of a client."""
        return int(self.offsets[client + 1] - self.offsets[client])

    @property
    def sizes(self) -> np.ndarray:
        """Samples of every client: int64, shape ``[clients]``."""
        return np.diff(self.offsets)

    def samples(self, client: int) -> torch.Tensor:
        """Indices of a client's samples into the data set: int64, shape ``[size(client)]``."""
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    def name(self, client: int) -> str:
        """What to call a client in a message."""
        return str(client) if self.names is None else self.names[client]

    def called(self, clients: Sequence[int]) -> list[Any]:
        """What a history has for clients: their names, or their numbers where they have none."""
        return [client if self.names is None else self.names[client] for client in clients]

    def split(self, test_fraction: float, seed: int = 0) -> tuple[Clients, Clients]:
        """Each client's samples as two parts, drawn by the seed: to train on, and to test its model
        on. What becomes of a sample follows from the seed, the client's number and the sample's
        place among the client's own, so that a client that is alone with its samples splits them as
        all clients together do.

        Args:
            test_fraction: how much of each client's samples is for tests, rounded down, above 0 and
                below 1; a client keeps at least one sample to train on.
            seed: decides which.

        Returns:
            The same clients with their training samples, and with their test samples, of which
            small clients may have none; both in the order that they had.

        Raises:
            UserError: `test_fraction` is out of bounds, or no client is large enough to have a test
                sample.
        """
        if not isinstance(test_fraction, (int, float)) or not 0 < test_fraction < 1:
            raise UserError(
                f"test_fraction={test_fraction!r}; it must be above 0 and below 1, such as 0.2"
            )
        tests = np.minimum(
            (self.sizes * test_fraction).astype(np.int64), np.maximum(self.sizes - 1, 0)
        )
        if not tests.any():
            raise UserError(
                f"test_fraction={test_fraction} of clients with at most {self.sizes.max()} samples "
                "gives none a test sample; write a larger fraction"
            )
        owner = np.repeat(np.arange(len(self)), self.sizes)
        place = np.arange(len(owner)) - np.repeat(self.offsets[:-1], self.sizes)
        keys = mixed_array(
            mixed_array(
                np.arange(len(self), dtype=np.uint64) ^ np.uint64(derive_seed(seed, "client tests"))
            )
        )
        drawn = mixed_array(mixed_array(keys[owner] ^ place.astype(np.uint64)))
        order = np.lexsort((drawn, owner))  # each client's own samples, shuffled
        for_tests = np.zeros(len(owner), dtype=bool)
        for_tests[order[place < np.repeat(tests, self.sizes)]] = True
        samples = self.indices.numpy()
        train = Clients.from_arrays(
            samples[~for_tests], np.concatenate([[0], np.cumsum(self.sizes - tests)]), self.names
        )
        return train, Clients.from_arrays(
            samples[for_tests], np.concatenate([[0], np.cumsum(tests)]), self.names
        )

    def check_exact(self, num_samples: int) -> None:
        """Raise `UserError` unless every one of `num_samples` samples belongs to exactly one
        client."""
        counts = np.bincount(self.indices.numpy(), minlength=num_samples)
        if len(counts) > num_samples:
            raise UserError(
                f"the partition names sample {len(counts) - 1}, and the data set has {num_samples}"
            )
        if (counts == 1).all():
            return
        sample = int(np.flatnonzero(counts != 1)[0])
        raise UserError(
            f"sample {sample} belongs to {counts[sample]} clients; a partition gives every sample "
            "to exactly one "
            f"({int((counts == 0).sum())} belong to none, {int((counts > 1).sum())} to several)"
        )
