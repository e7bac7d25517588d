"""How one data set is dealt out to clients."""

from __future__ import annotations

from typing import Any

import numpy as np

from allhands.data import derive_seed
from allhands.errors import UserError
from allhands.federated.clients import Clients
from allhands.federated.samples import Samples


def iid(num_samples: int, clients: int, seed: int = 0) -> Clients:
    """Every client gets as many samples as any other (one more or less), drawn from all.

    Args:
        num_samples: samples of the data set.
        clients: how many clients.
        seed: decides who gets which.
    """
    order = np.random.default_rng(derive_seed(seed, "partition")).permutation(num_samples)
    offsets = np.arange(clients + 1, dtype=np.int64) * num_samples // clients
    return Clients.from_arrays(order, offsets)


def partition_of(given: Any, samples: Samples, clients: int | None, seed: int) -> Clients:
    """The clients that `given` describes, every sample with exactly one of them.

    Args:
        given: a `Clients`; a list of index lists; "iid".
        samples: the data set.
        clients: how many, where `given` does not say.
        seed: decides who gets which.

    Raises:
        UserError: what was given is none of these, or not exact.
    """
    if isinstance(given, Clients):
        made = given
    elif isinstance(given, (list, tuple)):
        made = Clients(given)
    elif given == "iid":
        if clients is None:
            raise UserError("partition='iid' needs the number of clients; write clients=10")
        made = iid(len(samples), clients, seed)
    else:
        raise UserError(f"partition={given!r} is not known; write 'iid', a list of index lists, or a Clients")
    if clients is not None and clients != len(made):
        raise UserError(f"clients={clients}, and the partition has {len(made)}; remove clients=, or make them agree")
    made.check_exact(len(samples))
    return made
